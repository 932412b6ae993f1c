"""A job on this node, from its delivery to its settlement: what came of its items, and the replies that say so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from appliance.errors import ApplianceError
from appliance.jobs import Done, Event, Failed, Job, Lane, Reply, Rerank, Usage
from appliance.queue.base import Delivery
from appliance.workers.reading import Reading

PART_BYTES_MAX = 512 * 1024  # of one reply; a server takes 1 MiB by default, and smaller parts interleave better


@dataclass(slots=True, eq=False)
class Item:
    """One tokenized input of an open job. `was_alone` marks the retry of an item that saw an engine die."""

    owner: "OpenJob"
    position: int
    ids: bytes
    tokens: int
    cost_ms: float  # what it adds to a batch, as predicted when it was read
    second_start: int = 0  # see `Tokens`
    was_alone: bool = False

    @property
    def arrived_s(self) -> float:
        return self.owner.arrived_s

    @property
    def lane(self) -> Lane:
        return self.owner.job.lane


@dataclass(slots=True, eq=False)
class OpenJob:
    """Delivered, not yet settled."""

    job: Job
    delivery: Delivery
    arrived_s: float  # monotonic
    extended_s: float  # monotonic; when the queue last heard of it
    is_settled: bool = False
    tokens: int = 0
    cost_left_ms: float = 0.0  # predicted time of what no device has computed yet
    truncated: tuple[int, ...] = ()
    _reading: Reading | None = None
    _buffers: list[memoryview | None] = field(default_factory=list)
    _missing: int = 0
    _width: int = 0

    def begin(self, reading: Reading, item_ms: Callable[[int], float]) -> list[Item]:
        """The job's items, now that it is read; `item_ms` predicts the cost of so many tokens."""
        inputs = reading.inputs
        self._reading = reading
        self._buffers = [None] * len(inputs)
        self._missing = len(inputs)
        self.tokens = sum(tokens.count for tokens in inputs)
        first = self.job.first_index
        self.truncated = tuple(first + position for position, tokens in enumerate(inputs) if tokens.is_truncated)
        items = [
            Item(self, position, tokens.ids, tokens.count, item_ms(tokens.count), tokens.second_start)
            for position, tokens in enumerate(inputs)
        ]
        self.cost_left_ms = sum(item.cost_ms for item in items)
        return items

    @property
    def is_per_token(self) -> bool:
        """Whether the engine gives a row per token of an input."""
        return self._reading is not None and self._reading.is_per_token

    def take(self, position: int, buffer: memoryview, *, width: int) -> bool:
        """Keep what the engine gave for one input; True when it was the last one missing."""
        assert self._buffers[position] is None, "an item was computed twice within one delivery"
        self._buffers[position] = buffer
        self._width = width
        self._missing -= 1
        return self._missing == 0

    def answer(self, *, part_bytes_max: int = PART_BYTES_MAX) -> list[Reply]:
        """The replies of a complete job: the parts of its answer, of a bounded size if they can be cut, then `Done`."""
        assert self._reading is not None, "answered before it was read"
        buffers = [buffer for buffer in self._buffers if buffer is not None]
        parts = self._reading.answer(buffers, self._width, part_bytes_max)
        return self._replies([*parts, Done(Usage(input_tokens=self.tokens), self.truncated)])

    def name_of(self, position: int) -> str:
        """The client's name of an input: "input[3]", "documents[3]"."""
        field_name = "documents" if isinstance(self.job.task, Rerank) else "input"
        return f"{field_name}[{self.job.first_index + position}]"

    def refusal(self, error: ApplianceError) -> list[Reply]:
        """The reply of a job that failed."""
        return self._replies([Failed.of(error)])

    def _replies(self, events: Sequence[Event]) -> list[Reply]:
        attempt = self.job.attempt_base + self.delivery.attempt
        return [Reply(self.job.id, attempt, seq, event) for seq, event in enumerate(events)]
