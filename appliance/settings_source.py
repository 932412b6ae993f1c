"""Where `Settings` come from: environment over file over defaults. Nothing else reads either.

A wrong value never starts the appliance: every error is a `StartupError` that names the setting, the value (never of a
secret) and what is allowed. Unknown keys of the file are errors. Unknown `APPLIANCE_*` variables are warnings, because
Kubernetes injects such variables for a Service named "appliance".
"""

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from appliance.errors import StartupError
from appliance.settings import SECRET_FIELDS, SHORT_NAMES, AliasSettings, ModelSettings, Settings
from appliance.settings_rules import check_rules
from appliance.tables import allowed, check_table, convert, did_you_mean, item_of, read_toml, struct_of

PREFIX = "APPLIANCE_"
CONFIG_VARIABLE = "APPLIANCE_CONFIG"
DEFAULT_FILE = Path("appliance.toml")

_KUBERNETES_NAME = re.compile(r"_SERVICE_HOST$|_SERVICE_PORT(_\w+)?$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
_KUBERNETES_VALUE = re.compile(r"^(tcp|udp|sctp)://")
_KUBERNETES_CURE = (
    "Kubernetes sets it for a Service of that name; set `enableServiceLinks: false` in the pod or rename the Service"
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedSettings:
    """Settings, and where each came from."""

    settings: Settings
    origins: dict[str, str]  # dotted name → "file" or "env NAME"; what is absent has its default
    warnings: tuple[str, ...]  # about the environment, for a person


def load_settings(*, config_file: Path | None, environ: Mapping[str, str]) -> Settings:
    """The effective settings; warnings go to the log. Raises `StartupError`, as `read_settings` does."""
    loaded = read_settings(config_file=config_file, environ=environ)
    for warning in loaded.warnings:
        _log.warning("%s", warning)
    return loaded.settings


def read_settings(*, config_file: Path | None, environ: Mapping[str, str]) -> LoadedSettings:
    """Read `config_file`, else the file that APPLIANCE_CONFIG names, else ./appliance.toml where it exists.

    Raises `StartupError` for a named file that is missing, and for anything in file or environment that does not fit.
    """
    path = _config_path(config_file, environ)
    table = read_toml(path) if path else {}
    check_table(table, Settings, path="", source=str(path), secrets=SECRET_FIELDS)
    settings = msgspec.convert(table, Settings)
    origins = {name: "file" for name in setting_types() if _holds(table, name)}
    variables, warnings = _sort_environment(environ)
    for name, variable in variables.items():
        settings = _replaced(settings, name, _parsed(name, variable, environ[variable]))
        origins[name] = f"env {variable}"
    check_rules(settings, origins)
    return LoadedSettings(settings, origins, tuple(warnings))


def log_format_of(environ: Mapping[str, str]) -> Literal["text", "json"]:
    """What the environment says of it, whatever is wrong with the rest."""
    return "json" if environ.get(variable_of("log_format"), "").strip() == "json" else "text"


def setting_types() -> dict[str, Any]:
    """Every setting that the environment can set: dotted name → annotation."""
    # `Any`: annotations are data here.
    kinds: dict[str, Any] = {}
    for field in msgspec.structs.fields(Settings):
        section = struct_of(field.type)
        if section is None:
            kinds[field.name] = field.type
        else:
            kinds |= {f"{field.name}.{inner.name}": inner.type for inner in msgspec.structs.fields(section)}
    return kinds


def variable_of(name: str) -> str:
    """The environment variable of a dotted name: "nats.url" → "APPLIANCE_NATS_URL"."""
    return PREFIX + name.replace(".", "_").upper()


def _config_path(config_file: Path | None, environ: Mapping[str, str]) -> Path | None:
    if config_file is not None:
        return config_file
    if named := environ.get(CONFIG_VARIABLE):
        return Path(named)
    return DEFAULT_FILE if os.path.lexists(DEFAULT_FILE) else None


def _holds(table: Mapping[str, Any], name: str) -> bool:
    section, _, field = name.rpartition(".")
    return field in (table.get(section, {}) if section else table)


def _sort_environment(environ: Mapping[str, str]) -> tuple[dict[str, str], list[str]]:
    """Which variable sets which setting (the long name wins over the short one), and warnings about the others."""
    long_names = {variable_of(name): name for name in setting_types()}
    variables: dict[str, str] = {}
    warnings: list[str] = []
    for variable in sorted(environ, key=lambda candidate: candidate in SHORT_NAMES):
        if not variable.startswith(PREFIX) or variable == CONFIG_VARIABLE:
            continue
        name = long_names.get(variable) or SHORT_NAMES.get(variable)
        if name is None:
            warnings.append(_unknown(variable, environ[variable], known=[*long_names, *SHORT_NAMES, CONFIG_VARIABLE]))
        elif name in variables:
            warnings.append(f"{variable} is ignored: {variables[name]} sets {name} too and wins")
        else:
            variables[name] = variable
    return variables, warnings


def _unknown(variable: str, value: str, *, known: list[str]) -> str:
    if _KUBERNETES_NAME.search(variable) or _KUBERNETES_VALUE.match(value):
        return f"{variable} is ignored; {_KUBERNETES_CURE}"
    return f"{variable} is ignored: no setting has this name{did_you_mean(variable, known)}"


def _parsed(name: str, variable: str, text: str) -> Any:
    # `Any`: of the type that the setting's annotation says.
    kind = setting_types()[name]
    label, is_secret = f"{name} (from {variable})", name in SECRET_FIELDS
    if name == "models":
        return tuple(ModelSettings(name=part) for part in _split(text))
    if name == "aliases":
        return tuple(_alias(part, label) for part in _split(text))
    if item_of(kind) is not None:
        return convert(_split(text), kind, name=label, is_secret=is_secret)
    if kind is str:
        return text
    if _KUBERNETES_VALUE.match(text):
        raise StartupError(
            f"{label} is {text!r}, it must be {allowed(kind)}. {_KUBERNETES_CURE}, or set {variable_of(name)}"
        )
    return convert(text.strip(), kind, name=label, is_secret=is_secret, is_text=True)


def _alias(text: str, label: str) -> AliasSettings:
    name, equals, model = text.partition("=")
    if not (equals and name and model):
        raise StartupError(
            f"{label} holds {text!r}, which is not of the form alias=model; policies need appliance.toml"
        )
    return AliasSettings(name=name.strip(), model=model.strip())


def _split(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def _replaced(settings: Settings, name: str, value: Any) -> Settings:
    section, _, field = name.rpartition(".")
    if section:
        inner = msgspec.structs.replace(getattr(settings, section), **{field: value})
        return msgspec.structs.replace(settings, **{section: inner})
    if name == "models":
        # The environment chooses by name; what the file says about a model of that name still holds.
        described = {model.name: model for model in settings.models}
        value = tuple(described.get(model.name, model) for model in value)
    return msgspec.structs.replace(settings, **{field: value})
