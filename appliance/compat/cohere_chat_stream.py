"""The stream of `POST /v2/chat`: Cohere's events and no others, since the AI SDK knows a closed set of them.

Content comes in blocks with an index of their own: a thought, then text. Text is told as content as it comes, though
calls may follow it, in which case a whole answer would have it as `tool_plan`; only where a call was asked for is it
sure to be a plan. Log-probabilities come with content; what calls are made of has no place for them. A call that was
cut has no `tool-call-end`, where the AI SDK reads its arguments.

A stream that breaks off ends with `message-end` and the reason ERROR, an `error`, no usage and no `[DONE]`. Cohere's
clients pass that on; without a usage the AI SDK reports an error of its own and LangChain raises one, where both would
take a complete event for a complete answer.
"""

from collections.abc import Mapping, Sequence

import msgspec

from appliance.compat import cohere_errors, sse
from appliance.compat.cohere_chat_answer import CohereUsage, logprob_item, new_call_id, new_id
from appliance.compat.cohere_generation import as_ascii, finish_of
from appliance.errors import ApplianceError
from appliance.jobs import CallPart, Chosen, Delta, Done

# cohere-node ends where a line has this in it, be it in a text.
_TERMINATOR = b"[DONE]"
_TERMINATOR_IN_TEXT = b"\\u005bDONE]"


class CohereChatWriter:
    """Writes the events of one answer."""

    content_type = sse.EVENT_STREAM
    takes_pings = False

    def __init__(self, *, is_plan: bool = False, has_thoughts: bool = True) -> None:
        """`is_plan`: text is the plan of a call that was asked for."""
        self._is_plan = is_plan
        self._has_thoughts = has_thoughts
        self._id = new_id()
        self._blocks = 0
        self._block = ""  # the type of the content that is being written
        self._call: int | None = None  # the call that is
        self._arguments: list[str] = []  # of that call
        self._has_said = False  # anything but thoughts

    def start(self) -> bytes:
        """The message begins."""
        return _event("message-start", {"id": self._id, "delta": {"message": {"role": "assistant"}}})

    def delta(self, choice: int, delta: Delta) -> bytes:
        """What was thought, said and called next."""
        events: list[bytes] = []
        if delta.reasoning and self._has_thoughts:
            events += self._content("thinking", delta.reasoning)
        if delta.text and self._is_plan:
            events.append(_event("tool-plan-delta", {"delta": {"message": {"tool_plan": delta.text}}}))
        elif delta.text:
            events += self._content("text", delta.text, delta.logprobs)
        for part in delta.calls:
            events += self._part(part)
        self._has_said |= bool(delta.text or delta.calls)
        return b"".join(events)

    def finish(self, choice: int, done: Done) -> bytes:
        """The message ends; one in which nothing was said has an empty text."""
        events: list[bytes] = []
        if not self._has_said and not self._is_plan:
            events += self._content("text", "")
        events += self._end() if done.finish == "tool_calls" or self._is_whole() else []
        reason = finish_of(done.finish, done.stop)
        events.append(_event("message-end", {"delta": {"finish_reason": reason, "usage": CohereUsage.of(done.usage)}}))
        return b"".join(events)

    def end(self) -> bytes:
        """All is there."""
        return sse.DONE

    def error(self, error: ApplianceError) -> bytes:
        """The stream ends here; see the module on what is left out and why."""
        message = str(cohere_errors.body(error)["message"])
        return _event("message-end", {"id": self._id, "delta": {"finish_reason": "ERROR", "error": message}})

    def _content(self, kind: str, piece: str, tokens: Sequence[Chosen] = ()) -> list[bytes]:
        events: list[bytes] = []
        if self._block != kind:
            events += self._end()
            begun = {"type": kind, kind: ""}
            events.append(self._of_block("content-start", {"delta": {"message": {"content": begun}}}))
            self._block = kind
        if piece:
            fields: dict[str, object] = {"delta": {"message": {"content": {kind: piece}}}}
            if tokens:
                fields["logprobs"] = logprob_item(tokens)
            events.append(self._of_block("content-delta", fields))
        return events

    def _part(self, part: CallPart) -> list[bytes]:
        events: list[bytes] = []
        if self._call != part.index:
            events += self._end()
            self._call = part.index
            self._arguments.clear()
            call = {"id": new_call_id(), "type": "function", "function": {"name": part.name, "arguments": ""}}
            events.append(self._of_call("tool-call-start", {"delta": {"message": {"tool_calls": call}}}))
        if part.arguments:
            self._arguments.append(part.arguments)
            more = {"function": {"arguments": part.arguments}}
            events.append(self._of_call("tool-call-delta", {"delta": {"message": {"tool_calls": more}}}))
        return events

    def _is_whole(self) -> bool:
        """Whether the arguments of the call that is being written, if there is one, can be read."""
        if self._call is None:
            return True
        try:
            msgspec.json.decode("".join(self._arguments))
        except msgspec.DecodeError:
            return False
        return True

    def _end(self) -> list[bytes]:
        """Ends the content or the call that is open."""
        events: list[bytes] = []
        if self._block:
            events.append(self._of_block("content-end", {}))
            self._blocks += 1
            self._block = ""
        if self._call is not None:
            events.append(self._of_call("tool-call-end", {}))
            self._call = None
        return events

    def _of_block(self, kind: str, fields: Mapping[str, object]) -> bytes:
        return _event(kind, {"index": self._blocks, **fields})

    def _of_call(self, kind: str, fields: Mapping[str, object]) -> bytes:
        return _event(kind, {"index": self._call, **fields})


def _event(kind: str, fields: Mapping[str, object]) -> bytes:
    line = as_ascii({"type": kind, **fields}).replace(_TERMINATOR, _TERMINATOR_IN_TEXT)
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), line)
