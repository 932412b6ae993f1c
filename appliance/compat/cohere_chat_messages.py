"""The messages of `POST /v2/chat`, turned into those of OpenAI's chats. Pure.

Parts of a content become one text, a line each; documents that a tool found become JSON; earlier thoughts are left out,
since models are not shown them; and a plan becomes what was said before the calls.
"""

from collections.abc import Iterator, Sequence
from typing import Final, Literal

import msgspec

from appliance.compat import chat_messages
from appliance.compat.chat_messages import ToolCall
from appliance.compat.cohere_documents import Document, data_of, value_text
from appliance.errors import InvalidRequest, UnsupportedParameter

_encoder: Final = msgspec.json.Encoder()
_objects: Final = msgspec.json.Decoder(dict[str, object])
_FIELDS: Final = ("role", "content", "tool_calls", "tool_call_id")


class Part(msgspec.Struct, frozen=True):
    """A part of a content, by its type."""

    type: str
    text: str | None = None
    document: Document | None = None


class Message(msgspec.Struct, frozen=True):
    """One message; other fields change nothing."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    tool_plan: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


def translated(messages: Sequence[Message]) -> list[chat_messages.Message]:
    """Raises InvalidRequest or UnsupportedParameter, which name the message, and the part of it, at fault."""
    found = [_translated(message, f"messages[{index}]") for index, message in enumerate(messages)]
    chat_messages.check(found)
    for index, message in enumerate(messages):
        for place, call in enumerate(message.tool_calls or ()):
            _check_arguments(call, f"messages[{index}].tool_calls[{place}].function.arguments")
    return found


def encoded(messages: Sequence[chat_messages.Message]) -> bytes:
    """As `Generate` takes them."""
    return _encoder.encode(
        [{name: value for name in _FIELDS if (value := getattr(message, name)) is not None} for message in messages]
    )


def _translated(message: Message, name: str) -> chat_messages.Message:
    content = message.content
    if isinstance(content, list):
        content = "\n".join(_texts(content, f"{name}.content", role=message.role))
    if message.role == "assistant":
        content = "\n".join(filter(None, (message.tool_plan, content))) or (None if message.tool_calls else content)
    return chat_messages.Message(
        message.role, content, tool_calls=message.tool_calls, tool_call_id=message.tool_call_id
    )


def _check_arguments(call: ToolCall, name: str) -> None:
    """Here and not in the node, which counts messages with the documents' one."""
    try:
        _objects.decode((call.function and call.function.arguments) or "{}")
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidRequest(f"'{name}' is no JSON object", param=name) from exc


def _texts(parts: Sequence[Part], name: str, *, role: str) -> Iterator[str]:
    if not parts:
        raise InvalidRequest(f"'{name}' is empty; send at least one part", param=name)
    for index, part in enumerate(parts):
        where = f"{name}[{index}]"
        match part.type:
            case "text":
                if part.text is None:
                    raise InvalidRequest(f"missing required field '{where}.text'", param=f"{where}.text")
                yield part.text
            case "document" if role == "tool":
                yield value_text(data_of(part.document, f"{where}.document"))
            case "thinking" if role == "assistant":
                pass
            case other:
                raise UnsupportedParameter(
                    f"'{where}' is of type '{other[:50]}', which the message of a {role} cannot have here",
                    param=where,
                )
