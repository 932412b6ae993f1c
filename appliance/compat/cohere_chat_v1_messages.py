"""One message and its history, as `POST /v1/chat` has them, turned into the messages of OpenAI's chats. Pure.

Calls have no ids there: a result names the call that it is of. It belongs to the call before it with this name and
these parameters, if that has no result yet; results of calls that are nowhere in the history bring their calls along.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import msgspec

from appliance.compat.chat_messages import MESSAGES_MAX, CalledFunction, Message, ToolCall
from appliance.compat.cohere_documents import check_data
from appliance.compat.json_bounds import JsonObject
from appliance.errors import InvalidRequest

_ROLES: Final = {"USER": "user", "CHATBOT": "assistant", "SYSTEM": "system"}

_encoder: Final = msgspec.json.Encoder()
_ordered: Final = msgspec.json.Encoder(order="deterministic")


class V1Call(msgspec.Struct, frozen=True):
    """A function and what it is called with."""

    name: str
    parameters: JsonObject = {}


class V1Result(msgspec.Struct, frozen=True):
    """What a call gave."""

    call: V1Call
    outputs: list[JsonObject]


class V1Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the history: of a tool it has results, of others a text."""

    role: Literal["USER", "CHATBOT", "SYSTEM", "TOOL"]
    message: str | None = None
    tool_calls: list[V1Call] | None = None
    tool_results: list[V1Result] | None = None


def continued(history: Sequence[V1Message], message: str, results: Sequence[V1Result]) -> list[V1Message]:
    """The history with the turn that is to be answered.

    Results of calls of the history come before the message, which asks on; others come after it, since it asked for
    them. Raises InvalidRequest, which names the field at fault.
    """
    if not message and not results:
        raise InvalidRequest("'message' is empty; send a text, or 'tool_results'", param="message")
    for index, result in enumerate(results):
        _check_result(result, f"tool_results[{index}]")
    said = [V1Message("USER", message)] if message else []
    found = [V1Message("TOOL", tool_results=list(results))] if results else []
    if found and _conversation(history).matched(results) is not None:
        return [*history, *found, *said]
    return [*history, *said, *found]


def check_history(history: Sequence[V1Message]) -> None:
    """Raises InvalidRequest, which names the message at fault."""
    if len(history) > MESSAGES_MAX:
        raise InvalidRequest(
            f"'chat_history' has {len(history)} messages, the limit is {MESSAGES_MAX}", param="chat_history"
        )
    for index, message in enumerate(history):
        _check_message(message, f"chat_history[{index}]")


def translated(history: Sequence[V1Message]) -> list[Message]:
    """A checked history as a chat."""
    return _conversation(history).messages


@dataclass(slots=True)
class _Conversation:
    messages: list[Message] = field(default_factory=list)
    # The ids that we gave to calls without a result yet, by what was called; the first of them is the last of its row.
    _waiting: dict[bytes, list[str]] = field(default_factory=dict)
    _calls: int = 0

    def say(self, role: str, text: str | None) -> None:
        self.messages.append(Message(role, text))
        self._waiting = {}

    def call(self, text: str | None, calls: Sequence[V1Call]) -> list[str]:
        """The ids of the calls."""
        ids = [f"call_{self._calls + number}" for number in range(len(calls))]
        self._calls += len(calls)
        self._waiting = {}
        for call_id, call in zip(reversed(ids), reversed(calls), strict=True):
            self._waiting.setdefault(_key(call), []).append(call_id)
        asked = [
            ToolCall(call_id, CalledFunction(call.name, _encoder.encode(call.parameters).decode()))
            for call_id, call in zip(ids, calls, strict=True)
        ]
        self.messages.append(Message("assistant", text or None, tool_calls=asked))
        return ids

    def matched(self, results: Sequence[V1Result]) -> list[str] | None:
        """The ids of the calls that these are results of; None if one is of none that waits."""
        ids: list[str] = []
        taken: Counter[bytes] = Counter()
        for result in results:
            key = _key(result.call)
            taken[key] += 1
            row = self._waiting.get(key, [])
            if taken[key] > len(row):
                return None
            ids.append(row[-taken[key]])
        return ids

    def answer(self, results: Sequence[V1Result]) -> None:
        ids = self.matched(results)
        if ids is None:
            ids = self.call(None, [result.call for result in results])
        for call_id, result in zip(ids, results, strict=True):
            self._waiting[_key(result.call)].pop()
            outputs = _encoder.encode(result.outputs).decode()
            self.messages.append(Message("tool", outputs, tool_call_id=call_id))


def _key(call: V1Call) -> bytes:
    """What is the same of calls that are."""
    return _ordered.encode(call)


def _conversation(history: Sequence[V1Message]) -> _Conversation:
    conversation = _Conversation()
    for message in history:
        if message.role == "TOOL":
            conversation.answer(message.tool_results or ())
        elif message.tool_calls:
            conversation.call(message.message, message.tool_calls)
        else:
            conversation.say(_ROLES[message.role], message.message)
    return conversation


def _check_message(message: V1Message, name: str) -> None:
    if message.tool_calls and message.role != "CHATBOT":
        raise InvalidRequest(f"'{name}.tool_calls' is the chatbot's alone", param=f"{name}.tool_calls")
    if message.role == "TOOL":
        if not message.tool_results:
            raise InvalidRequest(f"missing required field '{name}.tool_results'", param=f"{name}.tool_results")
    elif message.message is None and not message.tool_calls:
        raise InvalidRequest(f"missing required field '{name}.message'", param=f"{name}.message")
    for index, call in enumerate(message.tool_calls or ()):
        check_data(call.parameters, f"{name}.tool_calls[{index}].parameters")
    for index, result in enumerate(message.tool_results or ()):
        _check_result(result, f"{name}.tool_results[{index}]")


def _check_result(result: V1Result, name: str) -> None:
    check_data(result.call.parameters, f"{name}.call.parameters")
    check_data(result.outputs, f"{name}.outputs")
