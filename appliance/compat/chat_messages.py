"""Chat messages in OpenAI's shape, checked. Pure.

What passes travels on as the client's own bytes: parts become text, and roles what the model knows, in the node.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from appliance.errors import InvalidRequest, UnsupportedParameter

MESSAGES_MAX: Final = 10_000
_ROLES: Final = ("system", "developer", "user", "assistant", "tool", "function")
_TEXT_PARTS: Final = ("text", "input_text")
# For the OpenAPI document, which sees no more of messages than that a body carries them as they are.
SCHEMA: Final = {
    "type": "array",
    "minItems": 1,
    "maxItems": MESSAGES_MAX,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"enum": list(_ROLES)},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "minItems": 1, "items": {"type": "object", "required": ["type"]}},
                    {"type": "null"},
                ]
            },
            "tool_calls": {"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]},
            "tool_call_id": {"type": ["string", "null"]},
        },
    },
}


class Part(msgspec.Struct, frozen=True):
    """A part of a content; only text is read."""

    type: str
    text: str | None = None
    refusal: str | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    """What the assistant called."""

    id: str
    function: CalledFunction | None = None
    type: str = "function"


class Message(msgspec.Struct, frozen=True):
    """One message; other fields change nothing."""

    role: str
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None
    refusal: str | None = None


def check(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest or UnsupportedParameter, which name the message, and the part of it, at fault."""
    if not messages:
        raise InvalidRequest("'messages' is empty; send at least one message", param="messages")
    if len(messages) > MESSAGES_MAX:
        raise InvalidRequest(f"'messages' has {len(messages)} messages, the limit is {MESSAGES_MAX}", param="messages")
    call_ids: set[str] = set()
    for index, message in enumerate(messages):
        _check(message, f"messages[{index}]", call_ids)


def _check(message: Message, name: str, call_ids: set[str]) -> None:
    if message.role not in _ROLES:
        raise InvalidRequest(
            f"'{name}.role' is '{message.role[:50]}'; it must be one of {', '.join(_ROLES)}", param=f"{name}.role"
        )
    calls = message.tool_calls or []
    if message.role == "assistant":
        for place, call in enumerate(calls):
            if call.type != "function" or call.function is None:
                raise UnsupportedParameter(
                    f"'{name}.tool_calls[{place}]' is of type '{call.type[:50]}'; only functions are served",
                    param=f"{name}.tool_calls[{place}].type",
                )
            call_ids.add(call.id)
    elif calls:
        raise InvalidRequest(f"'{name}.tool_calls' is the assistant's alone", param=f"{name}.tool_calls")
    elif message.function_call:
        raise InvalidRequest(f"'{name}.function_call' is the assistant's alone", param=f"{name}.function_call")
    if message.content is None:
        if message.role != "assistant" or not (calls or message.function_call or message.refusal):
            raise InvalidRequest(f"missing required field '{name}.content'", param=f"{name}.content")
    elif isinstance(message.content, list):
        _check_parts(message.content, f"{name}.content", role=message.role)
    if message.role == "tool":
        _check_answers(message.tool_call_id, f"{name}.tool_call_id", call_ids)


def _check_parts(parts: Sequence[Part], name: str, *, role: str) -> None:
    if not parts:
        raise InvalidRequest(f"'{name}' is empty; send at least one part", param=name)
    for index, part in enumerate(parts):
        if part.type in _TEXT_PARTS:
            text = part.text
        elif part.type == "refusal" and role == "assistant":
            text = part.refusal
        else:
            raise UnsupportedParameter(
                f"'{name}[{index}]' is of type '{part.type[:50]}'; the model reads text only", param=f"{name}[{index}]"
            )
        if text is None:
            raise InvalidRequest(f"missing required field '{name}[{index}].text'", param=f"{name}[{index}].text")


def _check_answers(call_id: str | None, name: str, call_ids: set[str]) -> None:
    if call_id is None:
        raise InvalidRequest(f"missing required field '{name}'", param=name)
    if call_id not in call_ids:
        raise InvalidRequest(f"'{name}' is '{call_id[:50]}'; no call before it has this id", param=name)
