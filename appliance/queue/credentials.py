"""Where NATS is and who we are, as connection options; every file is checked before the library sees it."""

import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nkeys

from appliance.errors import StartupError
from appliance.settings import NatsSettings


def connect_options(settings: NatsSettings) -> dict[str, Any]:  # nats-py's keyword arguments
    """The arguments of nats-py's `connect` that say where and as whom.

    Raises `StartupError` for a missing url, or files that cannot be read or are not what they should be."""
    urls = [url.strip() for url in settings.url.split(",") if url.strip()]
    if not urls:
        raise StartupError('nats.url is empty; give one or more, like "nats://host:4222"')
    options: dict[str, Any] = {"servers": urls}
    if settings.user:
        options |= {"user": settings.user, "password": settings.password}
    if settings.nkey_seed_file:
        _check_seed(settings.nkey_seed_file)
        options["nkeys_seed"] = settings.nkey_seed_file
    if settings.credentials_file:
        _check_credentials(settings.credentials_file)
        options["user_credentials"] = settings.credentials_file
    if settings.tls_ca_file or settings.tls_cert_file or any(url.startswith("tls://") for url in urls):
        options["tls"] = _tls_context(settings)
    return options


def _tls_context(settings: NatsSettings) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=settings.tls_ca_file or None)
        if settings.tls_cert_file:
            context.load_cert_chain(settings.tls_cert_file, settings.tls_key_file or None)
    except OSError as error:
        files = [settings.tls_ca_file, settings.tls_cert_file, settings.tls_key_file]
        raise StartupError(f"the TLS files of nats ({', '.join(filter(None, files))}) do not load: {error}") from error
    return context


def _check_seed(file: str) -> None:
    try:
        nkeys.from_seed(bytearray(Path(file).read_bytes().strip())).wipe()
    except (OSError, ValueError, nkeys.NkeysError) as error:
        raise StartupError(f"nats.nkey_seed_file {file} is no nkey seed: {error!r}") from error


def _check_credentials(file: str) -> None:
    """nats-py would look for the markers for ever in a file without them."""
    try:
        text = Path(file).read_bytes()
    except OSError as error:
        raise StartupError(f"nats.credentials_file {file} cannot be read: {error}") from error
    if b"BEGIN NATS USER JWT" not in text or b"BEGIN USER NKEY SEED" not in text:
        raise StartupError(f"nats.credentials_file {file} holds no user JWT with its seed; make one with `nsc`")


def shown_url(url: str) -> str:
    """The servers of `nats.url` without user and password."""
    parts = [urlsplit(part.strip() if "://" in part else f"nats://{part.strip()}") for part in url.split(",")]
    return ", ".join(f"{part.scheme}://{part.netloc.rpartition('@')[2]}" for part in parts)
