"""A job on this node, from its delivery to its settlement: what came of its items, and the replies that say so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from appliance.errors import ApplianceError
from appliance.jobs import Done, Event, Failed, Job, Lane, Reply, Rerank, Usage
from appliance.queue.base import Delivery
from appliance.workers.read_job import QUERY, Reading
from appliance.workers.tokens import Tokens

PART_BYTES_MAX = 512 * 1024  # of one reply; a server takes 1 MiB by default, and smaller parts interleave better


@dataclass(slots=True, eq=False)
class Item:
    """One thing that a device computes for an open job: an input, or a piece of one, or an input in another way.

    `was_alone` marks the retry of an item that saw an engine die.
    """

    owner: "OpenJob"
    position: int  # among the job's items
    content: Tokens
    tokens: int
    cost_ms: float  # what it adds to a batch, as predicted when it was read
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
    is_counted: bool = False  # among the jobs that have ended
    input_tokens: int = 0
    cost_left_ms: float = 0.0  # predicted time of what no device has computed yet
    truncated: tuple[int, ...] = ()
    _reading: Reading | None = None
    _buffers: list[memoryview | None] = field(default_factory=list)
    _missing: int = 0
    _width: int = 0

    def begin(self, reading: Reading, item_ms: Callable[[int], float]) -> list[Item]:
        """The job's items, now that it is read; `item_ms` predicts the cost of so many tokens."""
        contents = reading.items
        self._reading = reading
        self._buffers = [None] * len(contents)
        self._missing = len(contents)
        counted = reading.input_tokens
        self.input_tokens = sum(content.count for content in contents) if counted is None else counted
        self.truncated = self._truncated(reading)
        items = [
            Item(self, place, content, content.count, item_ms(content.count)) for place, content in enumerate(contents)
        ]
        self.cost_left_ms = sum(item.cost_ms for item in items)
        return items

    def take(self, position: int, buffer: memoryview, *, width: int) -> bool:
        """Keep what the engine gave for one item; True when it was the last one missing."""
        assert self._buffers[position] is None, "an item was computed twice within one delivery"
        self._buffers[position] = buffer
        self._width = width
        self._missing -= 1
        return self._missing == 0

    def answer(self, *, part_bytes_max: int = PART_BYTES_MAX) -> list[Reply]:
        """The replies of a complete job: the parts of its answer, of a bounded size if they can be cut, then `Done`.

        Raises an ApplianceError that names the input where what the engine gave makes no answer.
        """
        assert self._reading is not None, "answered before it was read"
        buffers = [buffer for buffer in self._buffers if buffer is not None]
        parts = self._reading.answer(buffers, self._width, part_bytes_max)
        done = Done(Usage(input_tokens=self.input_tokens), self.truncated, self._reading.space)
        return self._replies([*parts, done])

    def name_of(self, position: int) -> str:
        """The client's name of what an item is of: "input[3]", "documents[3]", "query"."""
        assert self._reading is not None, "nothing is at fault before it was read"
        owner = self._reading.owners[position] if self._reading.owners else position
        if owner == QUERY:
            return "query"
        field_name = "documents" if isinstance(self.job.task, Rerank) else "input"
        return f"{field_name}[{self.job.first_index + owner}]"

    def refusal(self, error: ApplianceError) -> list[Reply]:
        """The reply of a job that failed."""
        return self._replies([Failed.of(error)])

    def _truncated(self, reading: Reading) -> tuple[int, ...]:
        if not any(content.is_truncated for content in reading.items):
            return ()
        owners = reading.owners or range(len(reading.items))
        cut = {owner for owner, content in zip(owners, reading.items, strict=True) if content.is_truncated} - {QUERY}
        return tuple(self.job.first_index + owner for owner in sorted(cut))

    def _replies(self, events: Sequence[Event]) -> list[Reply]:
        attempt = self.job.attempt_base + self.delivery.attempt
        return [Reply(self.job.id, attempt, seq, event) for seq, event in enumerate(events)]
