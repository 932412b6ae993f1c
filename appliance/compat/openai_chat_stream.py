"""The stream of `/v1/chat/completions`: chunks, each of one choice, and `[DONE]` where all is there."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from appliance.compat import openai_errors, sse
from appliance.compat.generation import total
from appliance.compat.openai_chat_answer import ChatLogprobs, ChatUsage, chosen_of, finish_reason, new_id
from appliance.errors import ApplianceError
from appliance.jobs import CallPart, Delta, Done, Usage


class CallDelta(msgspec.Struct, frozen=True):
    """What comes of one call; id, type and name with its first part."""

    index: int
    function: dict[str, str]
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET


class ChunkDelta(msgspec.Struct, frozen=True):
    """What comes of one message."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CallDelta] | msgspec.UnsetType = msgspec.UNSET
    function_call: dict[str, str] | msgspec.UnsetType = msgspec.UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    """Of one text."""

    index: int
    delta: ChunkDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, frozen=True):
    """One event of a stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: None = None
    usage: ChatUsage | msgspec.UnsetType | None = msgspec.UNSET


class ChatWriter:
    """Writes the chunks of one request."""

    content_type = sse.EVENT_STREAM
    takes_pings = True

    def __init__(
        self, *, model: str, created_s: int, choices: int, is_legacy: bool = False, has_usage: bool = False
    ) -> None:
        """`is_legacy`: with functions as they were before tools. `has_usage`: a last chunk tells it."""
        self._choices = choices
        self._is_legacy = is_legacy
        self._model = model
        self._created_s = created_s
        self._id = new_id("chatcmpl-")
        self._has_usage = has_usage
        self._usages: list[Usage] = []
        self._called: set[tuple[int, int]] = set()  # choices and calls that were announced

    def start(self) -> bytes:
        """Every choice is announced with a role."""
        return b"".join(
            self._chunk(ChunkChoice(index, ChunkDelta(role="assistant", content=""))) for index in range(self._choices)
        )

    def delta(self, choice: int, delta: Delta) -> bytes:
        """The next part of a choice."""
        logprobs = ChatLogprobs([chosen_of(each) for each in delta.logprobs]) if delta.logprobs else None
        calls = [made for part in delta.calls for made in self._call_deltas(choice, part)]
        chunks: list[ChunkChoice] = []
        if delta.reasoning:
            chunks.append(ChunkChoice(choice, ChunkDelta(reasoning_content=delta.reasoning)))
        if delta.text or logprobs is not None or not (chunks or calls):
            chunks.append(ChunkChoice(choice, ChunkDelta(content=delta.text), logprobs))
        chunks += [ChunkChoice(choice, call) for call in calls]
        return b"".join(map(self._chunk, chunks))

    def finish(self, choice: int, done: Done) -> bytes:
        """A choice is complete."""
        self._usages.append(done.usage)
        reason = finish_reason(done.finish, is_legacy=self._is_legacy)
        return self._chunk(ChunkChoice(choice, ChunkDelta(), finish_reason=reason))

    def end(self) -> bytes:
        """All are."""
        if not self._has_usage:
            return sse.DONE
        return self._event([], ChatUsage.of(total(self._usages))) + sse.DONE

    def error(self, error: ApplianceError) -> bytes:
        """The stream ends here. There is no `[DONE]`: it would say that all is there."""
        return sse.data(openai_errors.body(error))

    def _call_deltas(self, choice: int, part: CallPart) -> Iterator[ChunkDelta]:
        """A call is announced before its arguments, without any."""
        if (choice, part.index) not in self._called:
            self._called.add((choice, part.index))
            named = {"name": part.name, "arguments": ""}
            if self._is_legacy:
                yield ChunkDelta(function_call=named)
            else:
                yield ChunkDelta(tool_calls=[CallDelta(part.index, named, new_id("call_"), "function")])
        if part.arguments:
            rest = {"arguments": part.arguments}
            if self._is_legacy:
                yield ChunkDelta(function_call=rest)
            else:
                yield ChunkDelta(tool_calls=[CallDelta(part.index, rest)])

    def _chunk(self, choice: ChunkChoice) -> bytes:
        return self._event([choice], None if self._has_usage else msgspec.UNSET)

    def _event(self, choices: list[ChunkChoice], usage: ChatUsage | msgspec.UnsetType | None) -> bytes:
        return sse.data(
            ChatChunk(self._id, "chat.completion.chunk", self._created_s, self._model, choices, usage=usage)
        )
