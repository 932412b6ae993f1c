"""Rules that no single field can state: which settings need each other, and what a key or a name may look like."""

import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from appliance.errors import StartupError
from appliance.settings import AliasSettings, ModelSettings, NatsSettings, Settings

API_KEY_CHARS_MIN = 8
API_KEY_CHARS_MAX = 512
MODEL_NAME_CHARS_MAX = 200
NATS_SCHEMES = ("nats", "tls", "ws", "wss")


def check_rules(settings: Settings, origins: Mapping[str, str]) -> None:
    """Raise `StartupError` for the first rule that is broken. `origins` as in `LoadedSettings`."""
    _check_state_dir(settings.state_dir, origin=origins.get("state_dir", "default"))
    _check_api_keys(settings.gateway.api_keys, origin=origins.get("gateway.api_keys", "default"))
    if not settings.gateway.api_keys and not is_loopback(settings.gateway.host):
        raise StartupError(
            f'gateway.host is "{settings.gateway.host}" ({origins.get("gateway.host", "default")}), which other '
            "machines can reach, and there is no API key; set APPLIANCE_API_KEY (gateway.api_keys) or bind 127.0.0.1"
        )
    _check_nats(settings.nats)
    _check_models(settings.models)
    _check_aliases(settings.aliases)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach a server bound to `host`. Names are not looked up: only localhost counts."""
    name = host.strip().removeprefix("[").removesuffix("]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def _check_state_dir(folder: str, *, origin: str) -> None:
    """It is written into the NATS server's configuration, whose format cannot name every path."""
    if not folder or not folder.isprintable():
        raise StartupError(f"state_dir ({origin}) is {folder[:80]!r}, it must be a path of printable UTF-8 characters")


def _check_api_keys(keys: Sequence[str], *, origin: str) -> None:
    for number, key in enumerate(keys, start=1):
        label = f"gateway.api_keys ({origin}), key {number} of {len(keys)}"
        if not key.strip():
            raise StartupError(f"{label} is empty; remove it, or give it at least {API_KEY_CHARS_MIN} characters")
        if not all("!" <= character <= "~" for character in key):
            raise StartupError(f"{label} holds a space or a character that is not ASCII; HTTP headers take neither")
        if not API_KEY_CHARS_MIN <= len(key) <= API_KEY_CHARS_MAX:
            raise StartupError(
                f"{label} has {len(key)} characters, allowed are {API_KEY_CHARS_MIN} to {API_KEY_CHARS_MAX}; "
                "`openssl rand -hex 24` makes a good one"
            )
    if len(set(keys)) < len(keys):
        raise StartupError(f"gateway.api_keys ({origin}) holds the same key twice")


def _check_nats(nats: NatsSettings) -> None:
    for url in filter(None, (part.strip() for part in nats.url.split(","))):
        if not _is_nats_url(url):
            raise StartupError(
                "nats.url holds something that is no address; give one or more of the form nats://host:4222, "
                "comma-separated"  # without the value: it may hold a password
            )
    for one, other in (("user", "password"), ("tls_cert_file", "tls_key_file")):
        if bool(getattr(nats, one)) != bool(getattr(nats, other)):
            present, absent = (one, other) if getattr(nats, one) else (other, one)
            raise StartupError(f"nats.{present} is set and nats.{absent} is not; set both or neither")
    ways = [name for name in ("user", "nkey_seed_file", "credentials_file") if getattr(nats, name)]
    if len(ways) > 1:
        raise StartupError(f"nats.{ways[0]} and nats.{ways[1]} are both set; choose one way to log in")


def _is_nats_url(url: str) -> bool:
    """Of the forms that the client library takes: "host", "host:port", and both with a scheme."""
    try:
        parts = urlsplit(url if "://" in url else f"nats://{url}")
        return parts.scheme in NATS_SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or out of range; brackets that do not match
        return False


def _check_models(models: Sequence[ModelSettings]) -> None:
    if not models:
        raise StartupError("models is empty, there is nothing to serve; add a [[models]] table or leave models out")
    for index, model in enumerate(models):
        label = f"models[{index}].name"
        if not model.name or not all(character.isprintable() and character != " " for character in model.name):
            raise StartupError(f"{label} is {model.name[:80]!r}, it must be a name without spaces")
        if len(model.name) > MODEL_NAME_CHARS_MAX:
            raise StartupError(f"{label} has {len(model.name)} characters, allowed are {MODEL_NAME_CHARS_MAX}")
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise StartupError(
                f'models holds "{name}" {names.count(name)} times; keep one [[models]] table of that name'
            )


def _check_aliases(aliases: Sequence[AliasSettings]) -> None:
    names = [alias.name for alias in aliases]
    for alias in aliases:
        if names.count(alias.name) > 1:
            raise StartupError(f'aliases names "{alias.name}" twice; keep one of them')
        if alias.width is not None and alias.pad_to is not None and alias.pad_to < alias.width:
            raise StartupError(f'aliases "{alias.name}": pad_to is {alias.pad_to}, less than its width {alias.width}')
