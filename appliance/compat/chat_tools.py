"""Functions that a chat may call, in OpenAI's nested shape, checked. Pure."""

from collections.abc import Sequence
from typing import Literal

import msgspec

from appliance.compat.json_bounds import JsonObject
from appliance.compat.responses_settings import TOOLS_MAX, check_schema, checked_name
from appliance.errors import InvalidRequest, UnsupportedParameter

Mode = Literal["none", "auto", "required"]

_encoder = msgspec.json.Encoder()


class Function(msgspec.Struct, frozen=True, omit_defaults=True):
    """A function's signature."""

    name: str | None = None
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True):
    """A tool, of a type that may not be served."""

    type: str
    function: Function | None = None


class NamedFunction(msgspec.Struct, frozen=True):
    """A function by its name."""

    name: str | None = None


class NamedTool(msgspec.Struct, frozen=True):
    """A tool by its function's name."""

    type: str
    function: NamedFunction | None = None


class AllowedTools(msgspec.Struct, frozen=True):
    """Some of the tools."""

    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class Choice(msgspec.Struct, frozen=True):
    """Which tools may or must be called."""

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class Offer(msgspec.Struct, frozen=True):
    """What a model is offered: as `jobs.Generate` has it."""

    tools: bytes = b""
    mode: Mode = "auto"
    name: str = ""


def offer(tools: Sequence[Tool] | None, choice: str | Choice | None) -> Offer:
    """Raises InvalidRequest or UnsupportedParameter, which name the tool or the choice at fault."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("'tool_choice' is only allowed with 'tools'", param="tool_choice")
        return Offer()
    if len(tools) > TOOLS_MAX:
        raise InvalidRequest(f"'tools' has {len(tools)} tools, the limit is {TOOLS_MAX}", param="tools")
    names = _names([_function(tool, f"tools[{index}]") for index, tool in enumerate(tools)], "tools[{}].function")
    match choice:
        case None | "auto":
            return Offer(_encoder.encode(tools), "auto")
        case "none" | "required":
            return Offer(_encoder.encode(tools), choice)
        case Choice(type="function"):
            wanted = _known(choice.function, names, "tool_choice.function.name")
            return Offer(_encoder.encode(tools), "required", wanted)
        case Choice(type="allowed_tools", allowed_tools=AllowedTools() as allowed):
            kept = _allowed(allowed.tools, names)
            offered = [tool for tool, name in zip(tools, names, strict=True) if name in kept]
            return Offer(_encoder.encode(offered), allowed.mode)
        case _:
            raise UnsupportedParameter("'tool_choice' is of a type that is not served", param="tool_choice")


def legacy(functions: Sequence[Function], choice: Literal["none", "auto"] | NamedFunction | None) -> Offer:
    """`functions`, one at least, and `function_call`, as they were before tools; raises like `offer`."""
    if len(functions) > TOOLS_MAX:
        raise InvalidRequest(f"'functions' has {len(functions)} functions, the limit is {TOOLS_MAX}", param="functions")
    names = _names(functions, "functions[{}]")
    tools = _encoder.encode([Tool("function", function) for function in functions])
    if isinstance(choice, NamedFunction):
        return Offer(tools, "required", _known(choice, names, "function_call.name", offered="functions"))
    return Offer(tools, choice or "auto")


def _function(tool: Tool, name: str) -> Function:
    if tool.type != "function":
        raise UnsupportedParameter(
            f"'{name}' is of type '{tool.type[:50]}', which is not served; only functions are", param=f"{name}.type"
        )
    if tool.function is None:
        raise InvalidRequest(f"missing required field '{name}.function'", param=f"{name}.function")
    return tool.function


def _names(functions: Sequence[Function], field: str) -> list[str]:
    """Of the functions, which are checked; `field` is where they are, but for their numbers."""
    names: list[str] = []
    for index, function in enumerate(functions):
        place = field.format(index)
        name = checked_name(function.name, f"{place}.name")
        if name in names:
            raise InvalidRequest(f"'{place}.name' was there before", param=f"{place}.name")
        check_schema(function.parameters, f"{place}.parameters")
        names.append(name)
    return names


def _allowed(tools: Sequence[NamedTool], names: Sequence[str]) -> set[str]:
    field = "tool_choice.allowed_tools.tools"
    if not tools:
        raise InvalidRequest(f"'{field}' names no tool", param=field)
    for index, tool in enumerate(tools):
        if tool.type != "function":
            raise UnsupportedParameter(
                f"'{field}[{index}]' is of type '{tool.type[:50]}', which is not served; only functions are",
                param=f"{field}[{index}].type",
            )
    return {_known(tool.function, names, f"{field}[{index}].function.name") for index, tool in enumerate(tools)}


def _known(function: NamedFunction | None, names: Sequence[str], field: str, *, offered: str = "tools") -> str:
    if function is None or function.name is None:
        raise InvalidRequest(f"missing required field '{field}'", param=field)
    if function.name not in names:
        raise InvalidRequest(
            f"'{field}' is '{function.name[:64]}', which is not in '{offered}'", param=field.partition(".")[0]
        )
    return function.name
