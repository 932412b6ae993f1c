"""What `POST /v1/chat` answers with, and its stream: a line of JSON an event.

The last event has all of the answer once more. A stream that breaks off ends with the reason ERROR, the `error`, and a
response without text, so that nobody takes a part of an answer for the whole. Thoughts have no place in this API.
"""

import uuid
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from appliance.compat import cohere_errors
from appliance.compat.cohere_chat_v1_messages import V1Call, V1Message
from appliance.compat.cohere_generation import FinishReason, Tokens, as_ascii, finish_of
from appliance.compat.cohere_meta import ApiVersion
from appliance.compat.generation import Call, Gathering, Generated
from appliance.errors import ApplianceError, EngineFailed
from appliance.jobs import Delta, Done, Usage

CONTENT_TYPE: Final = b"application/stream+json"

_objects: Final = msgspec.json.Decoder(dict[str, object])


class V1Meta(msgspec.Struct, frozen=True):
    """Nothing is billed here: both are the model's own count."""

    api_version: ApiVersion
    billed_units: Tokens
    tokens: Tokens


class CohereChatV1Answer(msgspec.Struct, frozen=True):
    """Cohere's v1 chat response. With calls, its text is the plan of them."""

    text: str
    generation_id: str
    response_id: str
    finish_reason: Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "ERROR"]
    chat_history: list[V1Message]
    meta: V1Meta
    tool_calls: list[V1Call] | msgspec.UnsetType = msgspec.UNSET


def answer_of(generated: Generated, history: Sequence[V1Message], *, generation_id: str) -> CohereChatV1Answer:
    """All of it. Raises EngineFailed for a call that is not cut and yet no JSON object: this API has no other form."""
    calls = [
        found for call in generated.calls if (found := _call(call, is_cut=generated.finish == "length")) is not None
    ]
    tokens = Tokens.of(generated.usage)
    return CohereChatV1Answer(
        text=generated.text,
        generation_id=generation_id,
        response_id=new_id(),
        finish_reason=_reason(finish_of(generated.finish, generated.stop)),
        chat_history=[*history, V1Message("CHATBOT", generated.text, calls or None)],
        meta=V1Meta(ApiVersion("1"), tokens, tokens),
        tool_calls=calls or msgspec.UNSET,
    )


class CohereChatV1Writer:
    """Writes the events of one answer; `history` is what it answers to."""

    content_type = CONTENT_TYPE
    takes_pings = False

    def __init__(self, history: Sequence[V1Message]) -> None:
        self._history = history
        self._id = new_id()
        self._gathering = Gathering()

    def start(self) -> bytes:
        """The answer begins."""
        return _line("stream-start", generation_id=self._id)

    def delta(self, choice: int, delta: Delta) -> bytes:
        """What was said and called next."""
        self._gathering.add(delta)
        lines = [_line("text-generation", text=delta.text)] if delta.text else []
        for part in delta.calls:
            chunk: dict[str, object] = {"index": part.index}
            chunk |= {"name": part.name} if part.name else {}
            chunk |= {"parameters": part.arguments} if part.arguments else {}
            lines.append(_line("tool-calls-chunk", tool_call_delta=chunk))
        return b"".join(lines)

    def finish(self, choice: int, done: Done) -> bytes:
        """All of it once more."""
        answer = answer_of(self._gathering.whole(done), self._history, generation_id=self._id)
        calls = b""
        if answer.tool_calls:
            calls = _line("tool-calls-generation", text=answer.text, tool_calls=answer.tool_calls)
        # The event knows no STOP_SEQUENCE, its response does.
        reason = "COMPLETE" if answer.finish_reason == "STOP_SEQUENCE" else answer.finish_reason
        return calls + _line("stream-end", finish_reason=reason, response=answer)

    def end(self) -> bytes:
        """The last event said so."""
        return b""

    def error(self, error: ApplianceError) -> bytes:
        """The stream ends here."""
        message = str(cohere_errors.body(error)["message"])
        none = Tokens.of(Usage())
        response = CohereChatV1Answer(
            text="",
            generation_id=self._id,
            response_id=new_id(),
            finish_reason="ERROR",
            chat_history=list(self._history),
            meta=V1Meta(ApiVersion("1"), none, none),
        )
        return _line("stream-end", finish_reason="ERROR", error=message, response=response)


def new_id() -> str:
    """An id that nobody has had."""
    return str(uuid.uuid4())


def _reason(reason: FinishReason) -> Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "ERROR"]:
    """This API has no word for calls."""
    return "COMPLETE" if reason == "TOOL_CALL" else reason


def _call(call: Call, *, is_cut: bool) -> V1Call | None:
    """None for one that ends within its arguments, where tokens ran out: the reason says so."""
    try:
        return V1Call(call.name, _objects.decode(call.arguments or "{}"))
    except (msgspec.DecodeError, RecursionError) as exc:
        if is_cut:
            return None
        raise EngineFailed(f"the model called '{call.name}' with arguments that are no JSON object") from exc


def _line(kind: str, **fields: object) -> bytes:
    return as_ascii({"is_finished": kind == "stream-end", "event_type": kind, **fields}) + b"\n"
