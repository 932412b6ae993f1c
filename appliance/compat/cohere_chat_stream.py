"""The stream of `/v2/chat`: Cohere's events, and no others: AI SDK's set is closed, so there are no pings either.

A failure in mid-stream is a `message-end` with the reason "ERROR" and its words: cohere-python has no other event that
it would not swallow.
"""

import uuid

from appliance.compat import sse
from appliance.compat.cohere_generation import as_ascii, ended, tokens_of
from appliance.errors import ApplianceError
from appliance.jobs import CallPart, Delta, Done


class CohereChatWriter:
    """Writes the events of one request."""

    content_type = sse.EVENT_STREAM
    takes_pings = False

    def __init__(self) -> None:
        self._index = -1  # of the content or call at hand
        self._open = ""  # what is at hand: "text", "thinking", "call"
        self._call = -1

    def start(self) -> bytes:
        """The message begins."""
        message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
        return _event("message-start", id=str(uuid.uuid4()), delta={"message": message})

    def delta(self, choice: int, delta: Delta) -> bytes:
        """The next part."""
        parts: list[bytes] = []
        if delta.reasoning:
            parts.append(self._content("thinking", delta.reasoning))
        if delta.text:
            parts.append(self._content("text", delta.text))
        parts += [self._called(part) for part in delta.calls]
        return b"".join(parts)

    def finish(self, choice: int, done: Done) -> bytes:
        """The message is complete."""
        tokens = tokens_of(done.usage)
        usage = {"billed_units": tokens, "tokens": tokens, "cached_tokens": done.usage.cached_tokens}
        # A message without any content has an empty one, which clients look for.
        begun = b"" if self._index >= 0 else self._begin("text")
        return begun + self._end_content() + _event("message-end", delta={"finish_reason": ended(done), "usage": usage})

    def end(self) -> bytes:
        """Nothing more: Cohere has no `[DONE]`."""
        return b""

    def error(self, error: ApplianceError) -> bytes:
        """The stream ends here."""
        return self._end_content() + _event("message-end", delta={"finish_reason": "ERROR", "error": error.message})

    def _content(self, kind: str, text: str) -> bytes:
        begun = b"" if self._open == kind else self._end_content() + self._begin(kind)
        return begun + _event("content-delta", index=self._index, delta={"message": {"content": {kind: text}}})

    def _begin(self, kind: str) -> bytes:
        self._index += 1
        self._open = kind
        return _event("content-start", index=self._index, delta={"message": {"content": {"type": kind, kind: ""}}})

    def _called(self, part: CallPart) -> bytes:
        begun = b""
        if self._open != "call" or part.index != self._call:
            begun = self._end_content()
            self._index += 1
            self._open, self._call = "call", part.index
            call = {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": part.name, "arguments": ""},
            }
            begun += _event("tool-call-start", index=self._index, delta={"message": {"tool_calls": call}})
        if not part.arguments:
            return begun
        message = {"tool_calls": {"function": {"arguments": part.arguments}}}
        return begun + _event("tool-call-delta", index=self._index, delta={"message": message})

    def _end_content(self) -> bytes:
        kind, self._open = self._open, ""
        if not kind:
            return b""
        return _event("tool-call-end" if kind == "call" else "content-end", index=self._index)


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), as_ascii({"type": kind, **fields}))
