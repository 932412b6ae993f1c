"""The stream of `/v1/responses`: events of which each has its type twice (`event:` and `type`) and a number.

Items come one after another: what begins one ends the one before. There is no `[DONE]`; the last event is
`response.completed`, `response.incomplete` or, after an `error`, `response.failed`.
"""

from dataclasses import dataclass, field

import msgspec

from appliance.compat import openai_errors
from appliance.compat.generation import Call
from appliance.compat.response_usage import ResponseUsage
from appliance.compat.responses_answer import (
    IncompleteDetails,
    ItemStatus,
    MessageItem,
    OutputItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    TokenLogprob,
    call_item,
    lacks_message,
    logprobs,
    message_item,
    new_id,
    reasoning_item,
)
from appliance.errors import ApplianceError
from appliance.jobs import CallPart, Delta, Done

_encoder = msgspec.json.Encoder()


@dataclass(slots=True)
class _Open:
    """The item that is being written."""

    kind: str  # as the item's type
    id: str
    call_id: str = ""
    name: str = ""
    index: int = -1  # of a call, in its job
    pieces: list[str] = field(default_factory=list)
    tokens: list[TokenLogprob] = field(default_factory=list)

    def item(self, status: ItemStatus) -> OutputItem:
        """As it is so far."""
        text = "".join(self.pieces)
        if self.kind == "reasoning":
            return reasoning_item(self.id, text, status)
        if self.kind == "function_call":
            return call_item(self.id, self.call_id, Call(self.name, text), status)
        return message_item(self.id, text, self.tokens, status)

    def begun(self) -> OutputItem:
        """As it is announced: a message without a part yet."""
        if self.kind == "message":
            return MessageItem(id=self.id, status="in_progress", content=[])
        return self.item("in_progress")

    def part(self) -> OutputText | ReasoningText:
        """The one part of its content, as it is so far."""
        text = "".join(self.pieces)
        if self.kind == "reasoning":
            return ReasoningText(text=text)
        return OutputText(text=text, logprobs=self.tokens)


class ResponsesWriter:
    """Writes the events of one response. `response` is what is known before it begins."""

    content_type = b"text/event-stream"
    takes_pings = True

    def __init__(self, response: Response) -> None:
        self._response = response
        self._sequence = 0
        self._done: list[OutputItem] = []
        self._open: _Open | None = None
        self._tokens: list[TokenLogprob] = []  # of text that is held back

    def start(self) -> bytes:
        """The response is created and in progress."""
        return self._lifecycle("response.created") + self._lifecycle("response.in_progress")

    def delta(self, choice: int, delta: Delta) -> bytes:
        """What was thought, said and called next."""
        events: list[bytes] = []
        if delta.reasoning:
            events += self._piece("reasoning", "response.reasoning_text.delta", delta.reasoning)
        self._tokens += logprobs(delta.logprobs)
        if delta.text:
            tokens, self._tokens = self._tokens, []
            events += self._piece("message", "response.output_text.delta", delta.text, tokens)
        for part in delta.calls:
            events += self._call(part)
        return b"".join(events)

    def finish(self, choice: int, done: Done) -> bytes:
        """The open item ends, and with it the response."""
        is_cut = done.finish == "length"
        events: list[bytes] = []
        if self._open is None or self._open.kind == "reasoning":
            has_others = any(not isinstance(item, ReasoningItem) for item in self._done)
            if lacks_message(has_thought=self._open is not None, has_others=has_others, finish=done.finish):
                events += self._begin(_Open("message", new_id("msg")))
        events += self._end("incomplete" if is_cut else "completed")
        self._response = msgspec.structs.replace(
            self._response,
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            usage=ResponseUsage.of(done.usage),
        )
        events.append(self._lifecycle("response.incomplete" if is_cut else "response.completed"))
        return b"".join(events)

    def end(self) -> bytes:
        """Nothing: the response has ended the stream."""
        return b""

    def error(self, error: ApplianceError) -> bytes:
        """An `error`, flat as OpenAI's types have it and nested as its SDKs raise it, and the response that failed."""
        message = error.message[: openai_errors.MESSAGE_CHARS_MAX]
        nested = openai_errors.body(error)["error"]
        told = self._event("error", code=error.code, message=message, param=error.param, error=nested)
        if self._open is not None:
            self._done.append(self._open.item("incomplete"))
            self._open = None
        self._response = msgspec.structs.replace(self._response, status="failed", error=_response_error(error))
        return told + self._lifecycle("response.failed")

    def _piece(self, kind: str, name: str, text: str, tokens: list[TokenLogprob] | None = None) -> list[bytes]:
        events: list[bytes] = []
        if self._open is None or self._open.kind != kind:
            events += self._begin(_Open(kind, new_id("msg" if kind == "message" else "rs")))
        assert self._open is not None
        self._open.pieces.append(text)
        shown: dict[str, object] = {"content_index": 0, "delta": text}
        if tokens is not None:
            self._open.tokens += tokens
            shown["logprobs"] = tokens
        events.append(self._item_event(name, **shown))
        return events

    def _call(self, part: CallPart) -> list[bytes]:
        events: list[bytes] = []
        if part.name:
            events += self._begin(
                _Open("function_call", new_id("fc"), call_id=new_id("call"), name=part.name, index=part.index)
            )
        assert self._open is not None
        assert self._open.index == part.index, "a call's parts follow its name, and the calls one another"
        if part.arguments:
            self._open.pieces.append(part.arguments)
            events.append(self._item_event("response.function_call_arguments.delta", delta=part.arguments))
        return events

    def _begin(self, item: _Open) -> list[bytes]:
        events = self._end("completed")
        self._open = item
        events.append(self._event("response.output_item.added", output_index=len(self._done), item=item.begun()))
        if item.kind != "function_call":
            events.append(self._item_event("response.content_part.added", content_index=0, part=item.part()))
        return events

    def _end(self, status: ItemStatus) -> list[bytes]:
        item = self._open
        if item is None:
            return []
        text = "".join(item.pieces)
        if item.kind == "function_call":
            events = [self._item_event("response.function_call_arguments.done", name=item.name, arguments=text)]
        elif item.kind == "reasoning":
            events = [self._item_event("response.reasoning_text.done", content_index=0, text=text)]
        else:
            events = [self._item_event("response.output_text.done", content_index=0, text=text, logprobs=item.tokens)]
        if item.kind != "function_call":
            events.append(self._item_event("response.content_part.done", content_index=0, part=item.part()))
        whole = item.item(status)
        events.append(self._event("response.output_item.done", output_index=len(self._done), item=whole))
        self._done.append(whole)
        self._open = None
        return events

    def _item_event(self, kind: str, /, **fields: object) -> bytes:
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, output_index=len(self._done), **fields)

    def _lifecycle(self, name: str) -> bytes:
        return self._event(name, response=msgspec.structs.replace(self._response, output=self._done))

    def _event(self, kind: str, /, **fields: object) -> bytes:
        data = _encoder.encode({"type": kind, "sequence_number": self._sequence, **fields})
        self._sequence += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), data)


def _response_error(error: ApplianceError) -> ResponseError:
    message = error.message[: openai_errors.MESSAGE_CHARS_MAX]
    if error.status == 429:
        return ResponseError("rate_limit_exceeded", message)
    return ResponseError("invalid_prompt" if error.status == 400 else "server_error", message)
