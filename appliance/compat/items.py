"""OpenAI's items, in which `/v1/responses` and `/v1/decisions` take a conversation, as the messages of a chat.

A turn of the assistant may be several items (what it said, the functions it called); in a chat it is one message.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from appliance.compat.bodies import why
from appliance.compat.json_bounds import JsonObject, check_bounds
from appliance.errors import InvalidRequest, UnsupportedParameter

ITEMS_MAX = 10_000
# Of the data of an `input_json` part.
JSON_LEVELS_MAX = 32
JSON_VALUES_MAX = 10_000
JSON_BYTES_MAX = 256 * 1024

_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})
_CALLS = frozenset({"function_call", "custom_tool_call"})
_OUTPUTS = frozenset({"function_call_output", "custom_tool_call_output"})
_ROLES = ("system", "developer", "user", "assistant")


class Part(msgspec.Struct, frozen=True):
    """One part of a content; `type` says which field it has. Others (annotations, cache marks) change nothing here."""

    type: str
    text: str | None = None
    refusal: str | None = None
    data: JsonObject | list[JsonObject] | None = None  # of `input_json`


class Item(msgspec.Struct, frozen=True):
    """One item of any type: `type` (a message, if there is none) says which fields it has."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a custom tool call
    output: str | list[Part] | None = None


class TextPart(msgspec.Struct, frozen=True):
    """A part of a chat message."""

    text: str
    type: str = "text"


class CalledFunction(msgspec.Struct, frozen=True):
    """What a call of a chat message calls."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a chat message."""

    id: str
    function: CalledFunction
    type: str = "function"


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of a chat, as `/v1/chat/completions` takes it."""

    role: str
    content: str | list[TextPart] | None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None


@dataclass(slots=True)
class _Turn:
    """A message that more items may join."""

    role: str
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    call_id: str | None = None

    def message(self) -> Message:
        """One text as such, several as parts: what joins them is the chat template's affair."""
        several = [TextPart(text) for text in self.texts] if len(self.texts) > 1 else None
        return Message(self.role, several or (self.texts[0] if self.texts else None), tuple(self.calls), self.call_id)


_encoder = msgspec.json.Encoder()
_object = msgspec.json.Decoder(dict[str, msgspec.Raw])


def messages(value: str | Sequence[Item], *, instructions: str | None = None, takes_json: bool = False) -> bytes:
    """A JSON array of chat messages; `instructions` come first, as the system's. `takes_json`: of `input_json` parts.

    Raises InvalidRequest or UnsupportedParameter, which name the part of `input` at fault.
    """
    turns = [] if instructions is None else [_Turn("system", [instructions])]
    turns += [_Turn("user", [value])] if isinstance(value, str) else _turns(value, takes_json=takes_json)
    return _encoder.encode([turn.message() for turn in turns])


def plain_text(value: str | Sequence[Part], name: str) -> str:
    """The text of a content, `input_json` included: its parts, a line each. `name` is what the client calls it."""
    return "\n".join(_texts(value, name, takes_json=True))


def _turns(items: Sequence[Item], *, takes_json: bool) -> list[_Turn]:
    if not items:
        raise InvalidRequest("'input' is empty; send a text or at least one item", param="input")
    if len(items) > ITEMS_MAX:
        raise InvalidRequest(f"'input' has {len(items)} items, the limit is {ITEMS_MAX}", param="input")
    turns: list[_Turn] = []
    call_ids: set[str] = set()
    for index, item in enumerate(items):
        _add(turns, item, f"input[{index}]", call_ids, takes_json=takes_json)
    if not turns:
        raise InvalidRequest("'input' has reasoning only; send at least one message", param="input")
    return turns


def _add(turns: list[_Turn], item: Item, name: str, call_ids: set[str], *, takes_json: bool) -> None:
    """Puts the item behind the turns found so far, or into the last of them."""
    kind = item.type or "message"
    last = turns[-1] if turns else None
    if kind == "message":
        turn = _said(item, name, takes_json=takes_json)
        if turn.role == "assistant" and last is not None and last.calls:
            # Said after a call and within the turn: a chat knows no message between a call and its output.
            last.texts += turn.texts
        else:
            turns.append(turn)
    elif kind in _CALLS:
        call = _call(item, name)
        call_ids.add(call.id)
        if last is None or last.role != "assistant":
            last = _Turn("assistant")
            turns.append(last)
        last.calls.append(call)
    elif kind in _OUTPUTS:
        turns.append(_output(item, name, call_ids))
    elif kind == "item_reference":
        raise UnsupportedParameter(
            f"'{name}' refers to an item, and nothing is stored here: send the item itself, as clients do with "
            "'store': false (Vercel's AI SDK: providerOptions: { openai: { store: false } })",
            param=name,
        )
    elif kind != "reasoning":  # what was thought is not given to the model again
        raise UnsupportedParameter(f"'{name}' is of type '{kind[:50]}', which is not served", param=f"{name}.type")


def _said(item: Item, name: str, *, takes_json: bool) -> _Turn:
    if item.role not in _ROLES:
        said = "missing" if item.role is None else f"'{item.role[:50]}'"
        raise InvalidRequest(f"'{name}.role' is {said}; it must be one of {', '.join(_ROLES)}", param=f"{name}.role")
    if item.content is None:
        raise InvalidRequest(f"missing required field '{name}.content'", param=f"{name}.content")
    return _Turn(item.role, _texts(item.content, f"{name}.content", takes_json=takes_json and item.role == "user"))


def _call(item: Item, name: str) -> ToolCall:
    if item.type == "custom_tool_call":
        arguments = _encoder.encode({"input": _needed(item.input, f"{name}.input")}).decode()
    else:
        arguments = _needed(item.arguments, f"{name}.arguments")
        _check_arguments(arguments, f"{name}.arguments")
    function = CalledFunction(_needed(item.name, f"{name}.name"), arguments)
    return ToolCall(_needed(item.call_id, f"{name}.call_id"), function)


def _check_arguments(arguments: str, name: str) -> None:
    """A chat template writes them out from an object, or from nothing."""
    if not arguments:
        return
    try:
        _object.decode(arguments)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        raise InvalidRequest(f"'{name}' is no JSON object: {why(error)}", param=name) from error


def _output(item: Item, name: str, call_ids: set[str]) -> _Turn:
    call_id = _needed(item.call_id, f"{name}.call_id")
    if call_id not in call_ids:
        raise InvalidRequest(
            f"'{name}.call_id' is '{call_id[:50]}'; no call before it has this id", param=f"{name}.call_id"
        )
    if item.output is None:
        raise InvalidRequest(f"missing required field '{name}.output'", param=f"{name}.output")
    return _Turn("tool", _texts(item.output, f"{name}.output", takes_json=False), call_id=call_id)


def _needed(value: str | None, name: str) -> str:
    if value is None:
        raise InvalidRequest(f"missing required field '{name}'", param=name)
    return value


def _texts(value: str | Sequence[Part], name: str, *, takes_json: bool) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not value:
        raise InvalidRequest(f"'{name}' is empty; send at least one part", param=name)
    return [_text(part, f"{name}[{index}]", takes_json=takes_json) for index, part in enumerate(value)]


def _text(part: Part, name: str, *, takes_json: bool) -> str:
    if part.type in _TEXT_PARTS:
        return _needed(part.text, f"{name}.text")
    if part.type == "refusal":
        return _needed(part.refusal, f"{name}.refusal")
    if part.type == "input_json" and takes_json:
        return _json_text(part, f"{name}.data")
    raise UnsupportedParameter(
        f"'{name}' is of type '{part.type[:50]}'; the model reads text only", param=f"{name}.type"
    )


def _json_text(part: Part, name: str) -> str:
    if part.data is None:
        raise InvalidRequest(f"missing required field '{name}'", param=name)
    check_bounds(part.data, name, levels_max=JSON_LEVELS_MAX, values_max=JSON_VALUES_MAX)
    text = _encoder.encode(part.data)
    if len(text) > JSON_BYTES_MAX:
        raise InvalidRequest(f"'{name}' has {len(text)} bytes, the limit is {JSON_BYTES_MAX}", param=name)
    return text.decode()
