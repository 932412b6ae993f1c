"""What `/v1/responses` is told of tools and of the text's form, checked and turned into what a chat knows."""

import re
from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from appliance.compat.json_bounds import JsonObject, check_bounds
from appliance.compat.responses_answer import (
    AllowedTools,
    FunctionChoice,
    FunctionTool,
    JsonFormat,
    PlainFormat,
    SchemaFormat,
    TextSettings,
    ToolChoice,
)
from appliance.errors import InvalidRequest, UnsupportedParameter

T = TypeVar("T")

TOOLS_MAX = 128
SCHEMA_LEVELS_MAX = 64
SCHEMA_VALUES_MAX = 20_000

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_encoder = msgspec.json.Encoder()


class Tool(msgspec.Struct, frozen=True):
    """A tool, of a type that may not be served."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class NamedTool(msgspec.Struct, frozen=True):
    """A tool by its name."""

    type: str
    name: str | None = None


class Choice(msgspec.Struct, frozen=True):
    """Which tools may or must be called."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[NamedTool] | None = None


class TextFormat(msgspec.Struct, frozen=True):
    """The form of the text; the rest is of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: JsonObject | None = None
    strict: bool | None = None


class Text(msgspec.Struct, frozen=True):
    """What the text is to be like."""

    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


def function_tools(tools: Sequence[Tool]) -> tuple[FunctionTool, ...]:
    """Raises InvalidRequest or UnsupportedParameter, which names the tool at fault."""
    if len(tools) > TOOLS_MAX:
        raise InvalidRequest(f"'tools' has {len(tools)} tools, the limit is {TOOLS_MAX}", param="tools")
    found = tuple(_function_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    known: set[str] = set()
    for index, tool in enumerate(found):
        if tool.name in known:
            raise InvalidRequest(f"'tools[{index}].name' was there before", param=f"tools[{index}].name")
        known.add(tool.name)
    return found


def _function_tool(tool: Tool, name: str) -> FunctionTool:
    if tool.type != "function":
        raise UnsupportedParameter(
            f"'{name}' is of type '{tool.type[:50]}', which is not served; only functions are", param=f"{name}.type"
        )
    tool_name = checked_name(tool.name, f"{name}.name")
    check_schema(tool.parameters, f"{name}.parameters")
    return FunctionTool(name=tool_name, description=tool.description, parameters=tool.parameters, strict=tool.strict)


def tool_choice(choice: str | Choice | None) -> ToolChoice:
    """Raises InvalidRequest or UnsupportedParameter for a choice that names no function."""
    match choice:
        case None | "auto":
            return "auto"
        case "none" | "required":
            return choice
        case Choice(type="function", name=str(name)):
            return FunctionChoice(name=name)
        case Choice(type="allowed_tools", mode=mode, tools=list(tools)) if tools:
            return AllowedTools(
                mode=mode or "auto",
                tools=[_allowed(tool, f"tool_choice.tools[{index}]") for index, tool in enumerate(tools)],
            )
        case Choice(type="function"):
            raise InvalidRequest("missing required field 'tool_choice.name'", param="tool_choice.name")
        case Choice(type="allowed_tools"):
            raise InvalidRequest("'tool_choice.tools' names no tool", param="tool_choice.tools")
    assert isinstance(choice, Choice)
    raise UnsupportedParameter(
        f"'tool_choice' is of type '{choice.type[:50]}', which is not served; only functions are",
        param="tool_choice.type",
    )


def _allowed(tool: NamedTool, name: str) -> FunctionChoice:
    if tool.type != "function" or tool.name is None:
        raise UnsupportedParameter(f"'{name}' names no function", param=name)
    return FunctionChoice(name=tool.name)


def offered_tools(
    tools: Sequence[FunctionTool], choice: ToolChoice
) -> tuple[Sequence[FunctionTool], Literal["none", "auto", "required"], str]:
    """The tools that may be called, whether one must be, and its name where that is settled.

    Raises InvalidRequest for a choice of a tool that there is not.
    """
    names = {tool.name for tool in tools}
    match choice:
        case "none" | "auto":
            return tools, choice, ""
        case "required":
            if not tools:
                raise InvalidRequest("'tool_choice' is 'required' without 'tools'", param="tool_choice")
            return tools, choice, ""
        case FunctionChoice(name=name):
            _check_known(name, names, "tool_choice.name")
            return tools, "required", name
        case AllowedTools(mode=mode, tools=allowed):
            for index, tool in enumerate(allowed):
                _check_known(tool.name, names, f"tool_choice.tools[{index}].name")
            kept = {tool.name for tool in allowed}
            return [tool for tool in tools if tool.name in kept], mode, ""


def _check_known(name: str, names: set[str], field: str) -> None:
    if name not in names:
        raise InvalidRequest(f"'{field}' is '{name[:64]}', which is not in 'tools'", param=field)


def nested(tools: Sequence[FunctionTool]) -> bytes:
    """Tools as a chat has them."""
    return _encoder.encode(
        [
            {
                "type": "function",
                "function": {
                    name: value
                    for name in ("name", "description", "parameters", "strict")
                    if (value := getattr(tool, name)) is not None
                },
            }
            for tool in tools
        ]
    )


def text_settings(text: Text) -> TextSettings:
    """With what is absent filled in. Raises InvalidRequest for a schema that is incomplete."""
    form = text.format
    verbosity = text.verbosity or "medium"
    if form is None or form.type == "text":
        return TextSettings(PlainFormat(), verbosity)
    if form.type == "json_object":
        return TextSettings(JsonFormat(), verbosity)
    name = checked_name(form.name, "text.format.name")
    schema = _needed(form.schema, "text.format.schema")
    check_schema(schema, "text.format.schema")
    settings = SchemaFormat(name=name, description=form.description, schema=schema, strict=form.strict)
    return TextSettings(settings, verbosity)


def checked_name(value: str | None, field: str) -> str:
    name = _needed(value, field)
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"'{field}' is '{name[:64]}'; it must have 1 to 64 letters, digits, underscores or dashes", param=field
        )
    return name


def _needed(value: T | None, name: str) -> T:
    if value is None:
        raise InvalidRequest(f"missing required field '{name}'", param=name)
    return value


def check_schema(schema: JsonObject | None, name: str) -> None:
    check_bounds(schema, name, levels_max=SCHEMA_LEVELS_MAX, values_max=SCHEMA_VALUES_MAX)
