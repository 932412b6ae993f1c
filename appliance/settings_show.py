"""Settings as text: the effective values as TOML with each one's origin, and the reference of all settings.

Secrets never show: secret fields are "***", and so is the userinfo of every URL.
"""

import re
from collections.abc import Mapping
from typing import Any

import msgspec
import tomlkit
from tomlkit.items import Item, Table

from appliance.settings import SECRET_FIELDS, SHORT_NAMES, Settings
from appliance.settings_source import setting_types, variable_of
from appliance.tables import allowed

MASK = "***"
TABLES = ("models", "aliases")  # settings that are lists of tables
_USERINFO = re.compile(r"(?<=//)[^/]*@")


def show(settings: Settings, *, origins: Mapping[str, str] | None = None) -> str:
    """`settings` as TOML that `appliance.toml` takes (but for masked values). `origins` as in `LoadedSettings`."""
    document = tomlkit.document()
    sections: dict[str, Table] = {}
    for name in setting_types():
        section, _, field = name.rpartition(".")
        if name in TABLES:
            continue
        target: Any = sections.setdefault(section, tomlkit.table()) if section else document
        target.add(field, _commented(_masked(name, _value(settings, name)), name, origins))
    for section, table in sections.items():
        document.add(section, table)
    for name in TABLES:
        rows = getattr(settings, name)
        if rows:
            tables = tomlkit.aot()
            for row in rows:
                tables.append(_row_table(row))
            document.add(name, tables)
    text = tomlkit.dumps(document)
    return text if origins is None else f"# models: {origins.get('models', 'default')}\n{text}"


def reference() -> str:
    """One line a setting: name, environment variables, what is allowed, default."""
    defaults = Settings()
    short = {name: variable for variable, name in SHORT_NAMES.items()}
    lines = []
    for name, kind in setting_types().items():
        variables = " or ".join(filter(None, [short.get(name, ""), variable_of(name)]))
        default = "see `appliance config show`" if name in TABLES else tomlkit.item(_value(defaults, name)).as_string()
        lines.append(f"{name}\n    {variables}: {allowed(kind)}; default {default}")
    return "\n".join(lines)


def mask_url(url: str) -> str:
    """`url`, or several separated by commas, without user names, passwords and tokens."""
    masked = _USERINFO.sub(f"{MASK}@", url)
    # Anything the pattern does not take apart (no scheme, a raw slash in a password) is hidden whole.
    return masked if masked.count("@") == masked.count(f"{MASK}@") else MASK


def _value(settings: Settings, name: str) -> Any:
    # `Any`: a setting is a text, a number or a list of texts.
    section, _, field = name.rpartition(".")
    value = getattr(getattr(settings, section) if section else settings, field)
    return list(value) if isinstance(value, tuple) else value


def _masked(name: str, value: Any) -> Any:
    if name in SECRET_FIELDS:
        return [MASK] * len(value) if isinstance(value, list) else MASK if value else ""
    return mask_url(value) if name == "nats.url" else value


def _commented(value: Any, name: str, origins: Mapping[str, str] | None) -> Item:
    item: Item = tomlkit.item(value)
    if origins is not None:
        item.comment(origins.get(name, "default"))
    return item


def _row_table(row: msgspec.Struct) -> Table:
    table = tomlkit.table()
    for field, value in msgspec.to_builtins(row).items():
        if value not in ("", None, {}):
            table.add(field, list(value) if isinstance(value, tuple) else value)
    return table
