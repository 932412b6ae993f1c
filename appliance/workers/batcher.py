"""Which items run together, and when a batch leaves. Pure: time comes in as an argument.

A batch leaves when the device is idle, when it is full by tokens or items, or when its oldest item has waited
`max_wait_ms`. Within a lane the oldest item goes first and the batch is filled in arrival order, so nothing starves.
Interactive items go before bulk ones; while bulk items wait they are promised `bulk_share` of the batches.
"""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, Protocol, TypeVar

import msgspec

from appliance.jobs import Lane


class Waiting(Protocol):
    """What the batcher must know of an item."""

    @property
    def tokens(self) -> int: ...

    @property
    def arrived_s(self) -> float: ...

    @property
    def lane(self) -> Lane: ...


T = TypeVar("T", bound=Waiting)


class Budget(msgspec.Struct, frozen=True):
    """The bounds of one batch; from the preset."""

    tokens_max: int
    items_max: int
    max_wait_s: float
    bulk_share: float = 0.1


class Batcher(Generic[T]):
    """The items of one model that wait for a device."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._lanes: dict[Lane, deque[T]] = {"interactive": deque(), "bulk": deque()}
        self._formed: deque[list[T]] = deque()
        self._tokens = 0
        self._items = 0
        self._bulk_credit = 0.0

    @property
    def tokens_waiting(self) -> int:
        """Tokens of all items that wait."""
        return self._tokens

    @property
    def items_waiting(self) -> int:
        """How many items wait."""
        return self._items

    @property
    def oldest_s(self) -> float:
        """Arrival of the item that has waited longest; infinity when none waits."""
        heads = [queue[0].arrived_s for queue in self._lanes.values() if queue]
        formed = [min(item.arrived_s for item in batch) for batch in self._formed]
        return min([*heads, *formed], default=float("inf"))

    def add(self, item: T) -> None:
        """Append an item to its lane."""
        self._lanes[item.lane].append(item)
        self._count(item, 1)

    def form(self, batches: Iterable[list[T]]) -> None:
        """Put back whole batches, to run as they are and before anything else: what a fault was split into."""
        for batch in batches:
            self._formed.append(batch)
            for item in batch:
                self._count(item, 1)

    def is_full(self) -> bool:
        """Whether a whole batch waits."""
        return bool(self._formed or self._tokens >= self._budget.tokens_max or self._items >= self._budget.items_max)

    def due_s(self) -> float:
        """When a batch should leave although it is not full and the device is busy; infinity when nothing waits."""
        return self.oldest_s + self._budget.max_wait_s

    def next_batch(self, is_live: Callable[[T], bool]) -> tuple[list[T], list[T]]:
        """Take a batch: (items to run, items found dead on the way). Both leave the batcher.

        An item over the token budget by itself runs alone. The batch is empty only if no live item waits.
        """
        batch: list[T] = []
        dead: list[T] = []
        while self._formed and not batch:
            for item in self._formed.popleft():
                self._count(item, -1)
                (batch if is_live(item) else dead).append(item)
        if not batch:
            for lane in self._lane_order():
                self._fill(batch, dead, self._lanes[lane], is_live)
        return batch, dead

    def _fill(self, batch: list[T], dead: list[T], queue: deque[T], is_live: Callable[[T], bool]) -> None:
        tokens = sum(item.tokens for item in batch)
        while queue and len(batch) < self._budget.items_max:
            item = queue[0]
            if not is_live(item):
                dead.append(queue.popleft())
            elif batch and tokens + item.tokens > self._budget.tokens_max:
                return
            else:
                batch.append(queue.popleft())
                tokens += item.tokens
            self._count(item, -1)

    def _lane_order(self) -> tuple[Lane, Lane]:
        if not self._lanes["bulk"]:
            self._bulk_credit = 0.0
            return "interactive", "bulk"
        self._bulk_credit += self._budget.bulk_share
        if self._bulk_credit < 1.0:
            return "interactive", "bulk"
        self._bulk_credit -= 1.0
        return "bulk", "interactive"

    def _count(self, item: T, sign: int) -> None:
        self._tokens += sign * item.tokens
        self._items += sign
