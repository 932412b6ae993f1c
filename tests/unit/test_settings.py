"""Settings: precedence, errors that name the setting and the cure, and text that hides secrets."""

import tomllib
from pathlib import Path
from typing import Any

import hypothesis
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from appliance.errors import StartupError
from appliance.settings import SECRET_FIELDS, SHORT_NAMES, AliasSettings, Settings
from appliance.settings_rules import is_loopback
from appliance.settings_show import mask_url, reference, show
from appliance.settings_source import LoadedSettings, load_settings, read_settings, setting_types, variable_of
from appliance.tables import check_table, did_you_mean


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def settings_of(text: str, **environ: str) -> Settings:
    Path("appliance.toml").write_text(text, encoding="utf-8")
    return load_settings(config_file=None, environ=environ)


def refusal(text: str = "", **environ: str) -> str:
    with pytest.raises(StartupError) as caught:
        settings_of(text, **environ)
    return caught.value.message


def value_of(settings: Settings, name: str) -> Any:
    # `Any`: whatever type the setting has.
    value: Any = settings
    for part in name.split("."):
        value = getattr(value, part)
    return value


def test_without_file_and_environment_the_defaults_hold() -> None:
    assert load_settings(config_file=None, environ={"HOME": "/root"}) == Settings()


def test_every_default_passes_its_own_constraints() -> None:
    defaults = msgspec.to_builtins(Settings())

    check_table(tomllib.loads(show(Settings())), Settings, path="", source="defaults")
    assert msgspec.convert(defaults, Settings) == Settings()


def example_of(kind: Any) -> tuple[str, object]:
    """A value at the edge of what the annotation takes, as the environment spells it and as the setting holds it."""
    match inspect.type_info(kind):
        case inspect.IntType(ge=lowest):
            return str(lowest), lowest
        case inspect.FloatType(le=highest):
            return str(highest), highest
        case inspect.LiteralType(values=values):
            return str(values[-1]), values[-1]
        case inspect.BoolType():
            return "true", True
        case inspect.VarTupleType():
            return "first-key-1, second-key-2", ("first-key-1", "second-key-2")
        case _:
            return "text", "text"


@pytest.mark.parametrize("name", [name for name in setting_types() if name not in {"models", "aliases"}])
def test_every_setting_has_a_working_environment_variable(name: str) -> None:
    text, value = example_of(setting_types()[name])
    environ = {variable_of(name): text, "APPLIANCE_API_KEY": "a-long-enough-key"}
    partners = {"nats.user": "nats.password", "nats.tls_cert_file": "nats.tls_key_file"}
    for one, other in (partners | {other: one for one, other in partners.items()}).items():
        if name == one:
            environ[variable_of(other)] = "text"

    settings = load_settings(config_file=None, environ=environ)

    assert value_of(settings, name) == value


def test_aliases_come_from_the_environment_as_pairs() -> None:
    settings = load_settings(config_file=None, environ={"APPLIANCE_ALIASES": "a=org/m, b = org/n"})

    assert settings.aliases == (AliasSettings("a", "org/m"), AliasSettings("b", "org/n"))


@pytest.mark.parametrize("text", ["a", "a=", "=m", ""])
def test_an_alias_of_no_model_stops_the_start(text: str) -> None:
    with pytest.raises(StartupError, match="alias=model"):
        load_settings(config_file=None, environ={"APPLIANCE_ALIASES": text})


def test_environment_names_are_unique() -> None:
    names = [variable_of(name) for name in setting_types()]

    assert len(set(names)) == len(names)
    assert not set(names) & set(SHORT_NAMES)
    assert set(SHORT_NAMES.values()) | SECRET_FIELDS <= set(setting_types())


def test_environment_wins_over_file_over_default() -> None:
    text = "[gateway]\nport = 9000\nprocesses = 3"

    settings = settings_of(text, APPLIANCE_PORT="9001")

    assert (settings.gateway.port, settings.gateway.processes, settings.queue.replicas) == (9001, 3, 1)


def test_a_named_file_wins_over_the_file_in_the_folder() -> None:
    Path("other.toml").write_text("[gateway]\nport = 1")

    assert settings_of("[gateway]\nport = 2", APPLIANCE_CONFIG="other.toml").gateway.port == 1
    assert load_settings(config_file=Path("appliance.toml"), environ={"APPLIANCE_CONFIG": "x"}).gateway.port == 2


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[gateway]\nprot = 5", ["unknown key gateway.prot", 'did you mean "port"?']),
        ("[gatway]\nport = 5", ["unknown key gatway", 'did you mean "gateway"?']),
        ("[gateway]\nport = 70000", ["gateway.port is 70000", "a whole number from 1 to 65535"]),
        ("[gateway]\nport = '80'", ["gateway.port is '80'", "whole number"]),
        ("[gateway]\nport = true", ["gateway.port is True", "whole number"]),
        ("[gateway]\ndrain_s = nan", ["gateway.drain_s is nan", "a number from 0 to 600"]),
        ("[gateway]\nhost = 5", ["gateway.host is 5", "a text"]),
        ("gateway = 5", ["gateway is 5", "a table"]),
        ("models = 5", ["models is 5", "a list"]),
        ("[gateway]\nport =", ["appliance.toml", "line 2"]),
        ("[[models]]\nfolder = 'x'", ["models[0] lacks the key name"]),
        ("[[models]]\nname = 'x'\nnmae = 'y'", ["models[0].nmae", 'did you mean "name"?']),
        ("[[models]]\nname = 'x'\n[[models]]\nname = 'x'", ['"x" 2 times']),
        ("[[models]]\nname = ''", ["models[0].name"]),
        ("[[models]]\nname = 'a b'", ["models[0].name", "without spaces"]),
        ("[[models]]\nname = '" + "x" * 201 + "'", ["201 characters", "200"]),
        ("models = []", ["nothing to serve"]),
        ("[nats]\nuser = 'x'", ["nats.user is set and nats.password is not"]),
        ("[nats]\ntls_key_file = 'x'", ["nats.tls_key_file is set and nats.tls_cert_file is not"]),
        ("[nats]\nnkey_seed_file = 'x'\ncredentials_file = 'y'", ["both set"]),
    ],
)
def test_what_does_not_fit_in_the_file_is_named(text: str, parts: list[str]) -> None:
    message = refusal(text)

    assert [part for part in parts if part not in message] == []
    assert "appliance.toml" in message or "models" in message or "nats" in message


@pytest.mark.parametrize(
    ("variable", "value", "parts"),
    [
        ("APPLIANCE_PORT", "x", ["gateway.port", "APPLIANCE_PORT", "'x'", "from 1 to 65535"]),
        ("APPLIANCE_PORT", "0", ["'0'"]),
        ("APPLIANCE_PORT", "", ["''"]),
        ("APPLIANCE_PORT", "tcp://10.0.0.1:80", ["Kubernetes", "enableServiceLinks", "APPLIANCE_GATEWAY_PORT"]),
        ("APPLIANCE_GATEWAY_PORT", "tcp://10.0.0.1:80", ["Kubernetes", "enableServiceLinks"]),
        ("APPLIANCE_QUEUE_ACK_WAIT_S", "inf", ["queue.ack_wait_s", "from 0.5 to 600"]),
        ("APPLIANCE_CONFIG", "missing.toml", ["missing.toml does not exist"]),
        ("APPLIANCE_MODELS", "a,,b", ["models[1].name"]),
    ],
)
def test_what_does_not_fit_in_the_environment_is_named(variable: str, value: str, parts: list[str]) -> None:
    message = refusal(**{variable: value})

    assert [part for part in parts if part not in message] == []


@pytest.mark.parametrize("data", [b"\xff\xfe", b"x = 1\ny = '\xff'"])
def test_a_file_that_is_not_utf_8_is_refused(data: bytes) -> None:
    Path("appliance.toml").write_bytes(data)

    with pytest.raises(StartupError, match=r"line [12]: not UTF-8"):
        load_settings(config_file=None, environ={})


def test_a_folder_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    Path("huge.toml").write_bytes(b"#" * (1024 * 1024 + 1))

    with pytest.raises(StartupError, match="cannot be read"):
        load_settings(config_file=tmp_path, environ={})
    with pytest.raises(StartupError, match="is over"):
        load_settings(config_file=Path("huge.toml"), environ={})


def test_unknown_variables_are_warnings_and_kubernetes_ones_say_so() -> None:
    environ = {
        "APPLIANCE_GATEWAY_PRT": "5",
        "APPLIANCE_SERVICE_HOST": "10.0.0.1",
        "APPLIANCE_SERVICE_PORT_HTTP": "80",
        "APPLIANCE_PORT_80_TCP_ADDR": "10.0.0.1",
        "APPLIANCE_NATS_PORT": "tcp://10.0.0.2:4222",
        "OTHER": "x",
    }

    warnings = read_settings(config_file=None, environ=environ).warnings

    assert len(warnings) == 5
    assert next(warning for warning in warnings if "PRT" in warning).endswith('did you mean "APPLIANCE_GATEWAY_PORT"?')
    assert sum("Kubernetes" in warning for warning in warnings) == 4


def test_load_settings_logs_the_warnings(caplog: pytest.LogCaptureFixture) -> None:
    load_settings(config_file=None, environ={"APPLIANCE_NOSUCH": "1"})

    assert "APPLIANCE_NOSUCH is ignored" in caplog.text


def test_the_long_name_wins_over_the_short_one_even_where_kubernetes_sets_that() -> None:
    environ = {"APPLIANCE_PORT": "tcp://10.0.0.1:80", "APPLIANCE_GATEWAY_PORT": "81"}

    loaded = read_settings(config_file=None, environ=environ)

    assert loaded.settings.gateway.port == 81
    assert loaded.warnings == ("APPLIANCE_PORT is ignored: APPLIANCE_GATEWAY_PORT sets gateway.port too and wins",)


def test_models_from_the_environment_keep_what_the_file_says_about_them() -> None:
    text = "[[models]]\nname = 'mine'\nfolder = 'f'\n[[models]]\nname = 'other'"

    settings = settings_of(text, APPLIANCE_MODELS="mine, BAAI/bge-m3")

    assert [(model.name, model.folder) for model in settings.models] == [("mine", "f"), ("BAAI/bge-m3", "")]


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("[::1]", True),
        ("::ffff:127.0.0.1", True),
        ("localhost", True),
        ("LOCALHOST.", True),
        ("app.localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("", False),
        ("10.0.0.1", False),
        ("::ffff:10.0.0.1", False),
        ("fe80::1%eth0", False),
        ("localhost.example.com", False),
        ("127.1", False),  # an old spelling: taken for a name, so keys are asked for
        ("example.com", False),
    ],
)
def test_loopback_is_told_from_what_others_can_reach(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    if expected:
        assert settings_of("", APPLIANCE_HOST=host).gateway.host == host
    else:
        assert "APPLIANCE_API_KEY" in refusal("", APPLIANCE_HOST=host)
        assert settings_of("", APPLIANCE_HOST=host, APPLIANCE_API_KEY="12345678").gateway.api_keys == ("12345678",)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        ("", "is empty"),
        ("   ", "is empty"),
        ("12345678,", "key 2 of 2 is empty"),
        ("1234567", "7 characters"),
        ("x" * 513, "513 characters"),
        ("has a space", "space"),
        ("schlüssel-1", "not ASCII"),
        ("same-key-1,same-key-1", "twice"),
    ],
)
def test_bad_keys_are_refused_and_never_shown(keys: str, part: str) -> None:
    message = refusal("", APPLIANCE_API_KEY=keys)

    assert part in message
    assert "APPLIANCE_API_KEY" in message
    assert all(key.strip() not in message for key in keys.split(",") if key.strip())


@pytest.mark.parametrize(
    "text", ["[gateway]\napi_keys = 'hunter2hunter2'", "[gateway]\napi_keys = [['hunter2hunter2']]"]
)
def test_a_secret_of_the_wrong_type_is_not_shown_anywhere(text: str) -> None:
    Path("appliance.toml").write_text(text)

    with pytest.raises(StartupError) as caught:
        load_settings(config_file=None, environ={})

    assert "gateway.api_keys" in caught.value.message
    assert "hunter2" not in caught.value.message
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("folder", ["", "a\0b", "a\nb", "a\udcffb", "a\x07b"])
def test_a_state_dir_that_nats_cannot_be_told_of_is_refused(folder: str) -> None:
    assert "state_dir (env APPLIANCE_STATE_DIR)" in refusal(APPLIANCE_STATE_DIR=folder)


@pytest.mark.parametrize(
    "url",
    [":::", "nats://", "http://u:secret@h", "nats://h:99999", "nats://h:0", "nats://h:x", "http://h", "nats://[::1"],
)
def test_a_nats_url_that_is_no_address_is_refused_and_not_shown(url: str) -> None:
    message = refusal(APPLIANCE_NATS_URL=f"nats://good:4222, {url}")
    assert "nats.url holds something that is no address" in message
    assert "secret" not in message


@pytest.mark.parametrize("url", ["h", "h:4222", "nats://u:p@h:4222", "tls://[::1]:4222", "nats://a, nats://b:1,"])
def test_a_nats_url_of_any_usual_form_is_taken(url: str) -> None:
    assert settings_of("", APPLIANCE_NATS_URL=url).nats.url == url


def test_a_limit_that_no_server_can_count_is_refused() -> None:
    assert "queue.bulk_bytes_max" in refusal(APPLIANCE_QUEUE_BULK_BYTES_MAX=str(2**50 + 1))


def test_show_is_toml_with_origins_and_without_secrets() -> None:
    text = """
        [gateway]
        port = 9000
        [nats]
        url = "tls://user:hunter2@one:4222,tls://token@two:4222"
        user = "app"
        password = "hunter2"
        [[models]]
        name = "mine"
        folder = "f"
        aliases = []
        tuning = { batch_tokens_max = 512 }
        """
    Path("appliance.toml").write_text(text)
    environ = {"APPLIANCE_HOST": "0.0.0.0", "APPLIANCE_API_KEY": "hunter2hunter2,hunter2hunter3"}
    loaded: LoadedSettings = read_settings(config_file=None, environ=environ)

    shown = show(loaded.settings, origins=loaded.origins)

    table = tomllib.loads(shown)
    assert "hunter2" not in shown
    assert table["gateway"]["api_keys"] == ["***", "***"]
    assert table["nats"]["url"] == "tls://***@one:4222,tls://***@two:4222"
    assert table["models"] == [
        {"name": "mine", "folder": "f", "aliases": [], "tuning": {"batch_tokens_max": 512}},
    ]
    assert 'host = "0.0.0.0" # env APPLIANCE_HOST' in shown
    assert "port = 9000 # file" in shown
    assert "processes = 1 # default" in shown
    assert "# models: file" in shown


def test_what_show_prints_can_be_read_again() -> None:
    Path("again.toml").write_text(show(Settings()))

    assert load_settings(config_file=Path("again.toml"), environ={}) == Settings()


@pytest.mark.parametrize(
    ("url", "masked"),
    [
        ("nats://h:4222", "nats://h:4222"),
        ("nats://u:p@h:4222", "nats://***@h:4222"),
        ("nats://u:p,w@h,nats://v:q@i", "nats://***@h,nats://***@i"),
        ("nats://u:p@w@h", "nats://***@h"),
        ("u:p@h", "***"),
        ("nats://u:p/w@h", "***"),
        ("", ""),
    ],
)
def test_urls_lose_their_userinfo(url: str, masked: str) -> None:
    assert mask_url(url) == masked


@hypothesis.settings(deadline=None)  # not a test of speed
@given(st.text("/:@,.x", max_size=8), st.text("/:@,.x", max_size=8))
def test_no_url_however_odd_shows_what_comes_before_an_at_sign(before: str, after: str) -> None:
    assert "hunter2" not in mask_url(f"{before}hunter2@{after}")


def test_the_reference_names_every_setting_and_variable() -> None:
    text = reference()

    assert all(f"{name}\n" in text and variable_of(name) in text for name in setting_types())
    assert all(variable in text for variable in SHORT_NAMES)


def port_or_message(text: str) -> int | str:
    try:
        return load_settings(config_file=None, environ={"APPLIANCE_PORT": text}).gateway.port
    except StartupError as exc:
        return exc.message


@hypothesis.settings(deadline=None)  # not a test of speed
@given(st.integers(1, 65535))
def test_any_port_comes_back_from_the_environment(port: int) -> None:
    assert load_settings(config_file=None, environ={"APPLIANCE_PORT": f" {port} "}).gateway.port == port


@hypothesis.settings(deadline=None)  # not a test of speed
@given(st.text(max_size=40))
def test_any_port_text_is_either_a_port_or_refused(text: str) -> None:
    outcome = port_or_message(text)

    assert "gateway.port" in outcome if isinstance(outcome, str) else outcome == float(text)


def test_did_you_mean_is_silent_when_nothing_is_close() -> None:
    assert did_you_mean("zzz", ["port", "host"]) == ""
    assert did_you_mean("PORT", ["port", "host"]) == '; did you mean "port"?'
    assert did_you_mean("p" * 100_000, ["port"]) == ""
