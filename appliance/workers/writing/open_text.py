"""What is being written on this node for a job: its sequences, and the replies that tell of them."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from appliance.errors import ApplianceError, EngineFailed, InvalidRequest
from appliance.jobs import (
    Beat,
    Decide,
    Delta,
    Done,
    Event,
    Failed,
    Finish,
    Generate,
    Reply,
    Usage,
    Weights,
)
from appliance.workers.ledger import delta_bytes
from appliance.workers.open_job import PART_BYTES_MAX, OpenJob
from appliance.workers.wire import Begin, Grown
from appliance.workers.writing.writer import Prepared, Weighing


class OpenWriting(ABC):
    """A job and its sequences, numbered from 0 here and by the node for the engine."""

    def __init__(self, opened: OpenJob) -> None:
        self.opened = opened
        self.deaths = 0  # engines that died while they had one of its sequences
        self.is_over = False
        self.spoke_s = 0.0  # monotonic: when the gateway last heard of it
        self._next_seq = 0

    @property
    @abstractmethod
    def orders(self) -> Sequence[Begin]:
        """What to begin; the node puts its own numbers in."""

    @abstractmethod
    def take(self, number: int, grown: Grown) -> list[Event]:
        """One of its sequences grew. The events to send; the last is `Done` or `Failed` where the job is over."""

    @property
    @abstractmethod
    def is_begun(self) -> bool:
        """Whether the client may have seen a part of it, so that it cannot be done again."""

    @property
    def may_beat(self) -> bool:
        """Whether its gateway may hear that it is at work: that a stream has begun is for its first part to say."""
        return True

    @abstractmethod
    def restart(self) -> None:
        """Its sequences are begun anew."""

    @property
    @abstractmethod
    def is_stopped(self) -> bool:
        """Whether its sequences are no longer needed, though they would go on."""

    def replies(self, events: Sequence[Event]) -> list[Reply]:
        """These events, numbered on."""
        job = self.opened.job
        attempt = job.attempt_base + self.opened.delivery.attempt
        first = self._next_seq
        self._next_seq += len(events)
        return [Reply(job.id, attempt, first + place, event) for place, event in enumerate(events)]

    def failure(self, error: ApplianceError) -> list[Event]:
        """The job fails."""
        self.is_over = True
        return [Failed.of(error)]


@dataclass(slots=True)
class OpenSequence:
    """One sequence of a job, at the engine or on its way there; `number` is the job's own for it."""

    writing: OpenWriting
    number: int
    has_token: bool = False


class OpenText(OpenWriting):
    """A `Generate`: one sequence."""

    def __init__(self, opened: OpenJob, task: Generate, prepared: Prepared, *, model: str) -> None:
        super().__init__(opened)
        self._task = task
        self._prepared = prepared
        self._model = model
        self.restart()

    def restart(self) -> None:
        """See `OpenWriting`."""
        self._text = self._prepared.text()
        self._parts: list[Delta] = []
        self._size = 0
        self._output_tokens = 0
        self._cached_tokens = 0

    @property
    def orders(self) -> Sequence[Begin]:
        """See `OpenWriting`."""
        prepared = self._prepared
        return [
            Begin(
                sequence=0,
                model=self._model,
                ids=prepared.ids,
                tokens_max=prepared.tokens_max,
                sampling=self._task.sampling,
                stop_ids=prepared.stop_ids,
                grammar=prepared.grammar.rules,
                top_logprobs=self._task.top_logprobs,
            )
        ]

    @property
    def is_begun(self) -> bool:
        """See `OpenWriting`."""
        return self._task.is_streamed and self._next_seq > 0

    @property
    def may_beat(self) -> bool:
        """See `OpenWriting`."""
        return self.is_begun or not self._task.is_streamed

    @property
    def is_stopped(self) -> bool:
        """See `OpenWriting`."""
        return self._text.is_stopped

    def take(self, number: int, grown: Grown) -> list[Event]:
        """See `OpenWriting`."""
        self._cached_tokens += grown.cached
        if grown.finish == "refused":
            return self.failure(InvalidRequest(grown.fault, param=self._prepared.grammar.field or None))
        if grown.finish == "fault":
            return self.failure(EngineFailed(grown.fault))
        self._output_tokens += len(grown.ids)
        events = self._said(self._text.push(grown.ids, grown.logprobs, grown.top_ids, grown.top_logprobs))
        if grown.finish or self._text.is_stopped:
            ended = self._text.finish("length" if grown.finish == "length" else "stop")
            events += self._said(ended.delta)
            events += self._gathered()
            events.append(self._done(ended.finish, ended.stop, ended.reasoning_tokens))
            self.is_over = True
        elif self._task.is_streamed and not self.is_begun and not events:
            # The first token may be held back; the gateway hears that the text is under way.
            events.append(Beat())
        return events

    def _said(self, delta: Delta | None) -> list[Event]:
        if delta is None:
            return []
        if self._task.is_streamed:
            return [delta]
        self._parts.append(delta)
        return []

    def _gathered(self) -> list[Event]:
        """All of an unstreamed text, in parts of a bounded size."""
        events: list[Event] = []
        group: list[Delta] = []
        size = 0
        for part in self._parts:
            part_bytes = delta_bytes(part)
            if group and size + part_bytes > PART_BYTES_MAX:
                events.append(merged(group))
                group, size = [], 0
            group.append(part)
            size += part_bytes
        if group:
            events.append(merged(group))
        self._parts = []
        return events

    def _done(self, finish: Finish, stop: str, reasoning_tokens: int) -> Done:
        usage = Usage(
            input_tokens=self._prepared.input_tokens,
            output_tokens=self._output_tokens,
            cached_tokens=self._cached_tokens,
            reasoning_tokens=reasoning_tokens,
        )
        return Done(usage, finish=finish, stop=stop, tokens_max=self._prepared.writer.tokens_max)


class OpenDecision(OpenWriting):
    """A `Decide`: one sequence a question, each of a single look at the model."""

    def __init__(self, opened: OpenJob, task: Decide, weighings: Sequence[Weighing], *, model: str) -> None:
        super().__init__(opened)
        self._task = task
        self._weighings = weighings
        self._model = model
        self.restart()

    def restart(self) -> None:
        """See `OpenWriting`."""
        self._found: dict[int, bytes] = {}
        self._cached_tokens = 0

    @property
    def orders(self) -> Sequence[Begin]:
        """See `OpenWriting`."""
        return [
            Begin(sequence=number, model=self._model, ids=one.ids, tokens_max=1, weighed=one.options)
            for number, one in enumerate(self._weighings)
        ]

    @property
    def is_begun(self) -> bool:
        """See `OpenWriting`."""
        return False

    @property
    def is_stopped(self) -> bool:
        """See `OpenWriting`."""
        return False

    def take(self, number: int, grown: Grown) -> list[Event]:
        """See `OpenWriting`."""
        if grown.finish in ("fault", "refused"):
            return self.failure(EngineFailed(grown.fault))
        logprobs = np.array(grown.logprobs, dtype=np.float64)
        if len(logprobs) != len(self._weighings[number].options) or not np.isfinite(logprobs).all():
            return self.failure(EngineFailed("the model gave no probability to an option; try again"))
        weights = np.exp(logprobs - logprobs.max())
        shares = weights / weights.sum()
        if self._task.questions[number].kind == "predicate":
            shares = shares[:1]
        self._found[number] = shares.astype("<f4").tobytes()
        self._cached_tokens += grown.cached
        if len(self._found) < len(self._weighings):
            return []
        self.is_over = True
        usage = Usage(
            input_tokens=sum(len(one.ids) // 4 for one in self._weighings),
            output_tokens=len(self._weighings),
            cached_tokens=self._cached_tokens,
        )
        return [Weights(tuple(self._found[place] for place in range(len(self._weighings)))), Done(usage)]


def merged(deltas: Sequence[Delta]) -> Delta:
    """Consecutive parts as one."""
    return Delta(
        text="".join(delta.text for delta in deltas),
        reasoning="".join(delta.reasoning for delta in deltas),
        calls=tuple(part for delta in deltas for part in delta.calls),
        logprobs=tuple(chosen for delta in deltas for chosen in delta.logprobs),
    )
