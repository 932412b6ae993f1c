"""Tools as `POST /v1/chat` has them, parameter by parameter with Python's types, as JSON schemas. Pure."""

from collections.abc import Sequence
from typing import Final

import msgspec

from appliance.compat import chat_tools
from appliance.compat.json_bounds import JsonObject
from appliance.compat.responses_settings import checked_name
from appliance.errors import InvalidRequest

PARAMETERS_MAX: Final = 128
TYPE_CHARS_MAX: Final = 100

# JSON schema's own names are taken too.
_PLAIN: Final = {
    "str": "string",
    "string": "string",
    "int": "integer",
    "integer": "integer",
    "float": "number",
    "number": "number",
    "bool": "boolean",
    "boolean": "boolean",
    "dict": "object",
    "mapping": "object",
    "object": "object",
}
_LISTS: Final = ("list", "array", "sequence", "tuple", "set")


class V1Parameter(msgspec.Struct, frozen=True):
    """One parameter of a function."""

    type: str
    description: str | None = None
    required: bool | None = None


class V1Tool(msgspec.Struct, frozen=True):
    """A function that may be called."""

    name: str
    description: str | None = None
    parameter_definitions: dict[str, V1Parameter] | None = None


def translated(tools: Sequence[V1Tool]) -> list[chat_tools.Tool]:
    """Raises InvalidRequest, which names the tool, and the parameter of it, at fault."""
    found: list[chat_tools.Tool] = []
    names: set[str] = set()
    for index, tool in enumerate(tools):
        name = checked_name(tool.name, f"tools[{index}].name")
        if name in names:
            raise InvalidRequest(f"'tools[{index}].name' was there before", param=f"tools[{index}].name")
        names.add(name)
        schema = _schema(tool, f"tools[{index}].parameter_definitions")
        found.append(chat_tools.Tool("function", chat_tools.Function(name, tool.description, schema)))
    return found


def _schema(tool: V1Tool, name: str) -> JsonObject:
    definitions = tool.parameter_definitions or {}
    if len(definitions) > PARAMETERS_MAX:
        raise InvalidRequest(f"'{name}' has {len(definitions)} parameters, the limit is {PARAMETERS_MAX}", param=name)
    return {
        "type": "object",
        "properties": {
            key: _property(definition, f"{name}.{key[:64]}.type") for key, definition in definitions.items()
        },
        "required": [key for key, definition in definitions.items() if definition.required],
        "additionalProperties": False,
    }


def _property(definition: V1Parameter, name: str) -> JsonObject:
    described = {} if definition.description is None else {"description": definition.description}
    if len(definition.type) > TYPE_CHARS_MAX:
        raise InvalidRequest(
            f"'{name}' has {len(definition.type)} characters, the limit is {TYPE_CHARS_MAX}", param=name
        )
    return {**_type(definition.type, name), **described}


def _type(words: str, name: str) -> JsonObject:
    outer, bracket, rest = words.strip().partition("[")
    inner = rest.removesuffix("]").strip()
    outer = outer.strip().lower().removeprefix("typing.")
    if outer in _PLAIN:
        return {"type": _PLAIN[outer]}
    if outer in _LISTS:
        # A tuple's several types say less than they seem to: only one type of all items is told.
        is_one = bool(bracket) and "," not in inner
        return {"type": "array", "items": _type(inner, name)} if is_one else {"type": "array"}
    if outer == "optional" and bracket:
        return _type(inner, name)
    if outer == "any":
        return {}
    raise InvalidRequest(
        f"'{name}' is '{words[:50]}', which is no type that is known: send one of str, int, float, bool, list, dict",
        param=name,
    )
