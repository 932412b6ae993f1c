"""What the dialects of generation share: a call's tasks going in, whole answers or a stream of events coming out. Pure.

A dialect's `decode(body, form)` returns its `GenerationCall`. `gateway/generation.py` runs the tasks and hands what
comes back to the call: all of it at once (`answer`), or as it comes (`writer`).
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from appliance.errors import ApplianceError
from appliance.jobs import CallPart, Chosen, Delta, Done, Finish, Generate, Usage

# What a dialect calls the fields of `/v1/chat/completions`: patterns of whole names, and what stands for each.
Names = Sequence[tuple[str, str]]


class Call(msgspec.Struct, frozen=True):
    """A function that the model wants called."""

    name: str
    arguments: str  # JSON


class Generated(msgspec.Struct, frozen=True):
    """One choice, complete."""

    text: str
    reasoning: str
    calls: tuple[Call, ...]
    logprobs: tuple[Chosen, ...]
    finish: Finish
    stop: str  # the stop string before which the text ended
    usage: Usage


@dataclass(slots=True)
class Gathering:
    """Puts one choice together from its events."""

    _text: list[str] = field(default_factory=list)
    _reasoning: list[str] = field(default_factory=list)
    _calls: dict[int, list[CallPart]] = field(default_factory=dict)
    _logprobs: list[Chosen] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        """The next part."""
        self._text.append(delta.text)
        self._reasoning.append(delta.reasoning)
        self._logprobs += delta.logprobs
        for part in delta.calls:
            self._calls.setdefault(part.index, []).append(part)

    def whole(self, done: Done) -> Generated:
        """All of it."""
        calls = [self._calls[index] for index in sorted(self._calls)]
        return Generated(
            text="".join(self._text),
            reasoning="".join(self._reasoning),
            calls=tuple(
                Call("".join(part.name for part in parts), "".join(part.arguments for part in parts)) for parts in calls
            ),
            logprobs=tuple(self._logprobs),
            finish=done.finish,
            stop=done.stop,
            usage=done.usage,
        )


class StreamWriter(Protocol):
    """Writes one call's stream in its dialect; choices are numbered by their tasks. Nothing here blocks.

    Order of calls: `start`, then `delta` and `finish` of each choice as they come, then `end` or `error`.
    """

    content_type: bytes
    takes_pings: bool  # whether a comment may stand between its events, to show that the connection lives

    def start(self) -> bytes:
        """What comes before the first part; may be empty."""

    def delta(self, choice: int, delta: Delta) -> bytes:
        """The next part of a choice."""

    def finish(self, choice: int, done: Done) -> bytes:
        """A choice is complete."""

    def end(self) -> bytes:
        """All choices are."""

    def error(self, error: ApplianceError) -> bytes:
        """The stream ends here, without the rest."""


class GenerationCall(Protocol):
    """A checked request of one dialect. Its choices are its tasks' texts, in their order."""

    @property
    def model(self) -> str | None:
        """The public name; None: the default one."""

    @property
    def tasks(self) -> Sequence[Generate]:
        """What to generate; one at least. All are streamed or none is."""

    @property
    def is_streamed(self) -> bool:
        """Whether the client wants parts as they come."""

    @property
    def ignored(self) -> tuple[str, ...]:
        """Names of fields that change nothing here."""

    def answer(self, choices: Sequence[Generated], *, model: str, created_s: int) -> msgspec.Struct:
        """The whole answer. `model` is the name that the client used, `created_s` the time in unix seconds."""

    def writer(self, *, model: str, created_s: int) -> StreamWriter:
        """The writer of this call's stream; see `answer`."""


def in_names(error: ApplianceError, names: Names) -> ApplianceError:
    """The same error in a dialect's own names of fields: a node knows those of `/v1/chat/completions` only."""
    param = error.param or ""
    for pattern, name in names:
        if found := re.fullmatch(pattern, param):
            own = found.expand(name)
            # The field, or what is in it.
            message = re.sub(rf"'{re.escape(param)}(?=['.\[])", f"'{own}".replace("\\", r"\\"), error.message)
            return type(error)(message, param=own, retry_after_s=error.retry_after_s)
    return error


def total(usages: Sequence[Usage]) -> Usage:
    """The usage of a call of several choices of one prompt: its tokens count once."""
    return Usage(
        input_tokens=max((usage.input_tokens for usage in usages), default=0),
        output_tokens=sum(usage.output_tokens for usage in usages),
        cached_tokens=max((usage.cached_tokens for usage in usages), default=0),
        reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
    )
