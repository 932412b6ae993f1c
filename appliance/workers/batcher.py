"""Which items run together, and when a batch is full. Pure: time comes in as an argument.

The oldest item always leads the next batch, so nothing starves; the batch is filled with items of its length band,
oldest first, then with those of the bands next to it. A runner that pads pays for mixed lengths, a padding-free one
does not and has a single band. Interactive items go before bulk ones; while bulk items wait they are promised
`bulk_share` of the batches.
"""

from bisect import bisect_left
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
    def cost_ms(self) -> float: ...  # what it adds to a batch, as predicted

    @property
    def arrived_s(self) -> float: ...

    @property
    def lane(self) -> Lane: ...


T = TypeVar("T", bound=Waiting)


class Budget(msgspec.Struct, frozen=True):
    """The bounds of one batch; from the preset."""

    tokens_max: int
    items_max: int
    cost_ms_max: float
    max_wait_s: float
    length_bands: tuple[int, ...] = ()
    bulk_share: float = 0.1


class Batcher(Generic[T]):
    """The items of one model that wait for a device."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._bands = sorted(budget.length_bands)
        self._lanes: dict[Lane, list[deque[T]]] = {
            lane: [deque() for _ in range(len(self._bands) + 1)] for lane in ("interactive", "bulk")
        }
        self._formed: deque[list[T]] = deque()
        self._tokens = 0
        self._items = 0
        self._cost_ms = 0.0
        self._bulk_credit = 0.0

    @property
    def cost_waiting_ms(self) -> float:
        """Predicted time of all items that wait."""
        return self._cost_ms

    @property
    def batch_cost_ms(self) -> float:
        """About what the next batch takes: its share of all that waits, by the bound that it meets first."""
        budget = self._budget
        shares = (
            budget.tokens_max / max(self._tokens, 1),
            budget.items_max / max(self._items, 1),
            budget.cost_ms_max / max(self._cost_ms, 1e-9),
        )
        return self._cost_ms * min(1.0, *shares)

    @property
    def items_waiting(self) -> int:
        """How many items wait."""
        return self._items

    @property
    def oldest_s(self) -> float:
        """Arrival of the item that has waited longest; infinity when none waits."""
        heads = [band[0].arrived_s for bands in self._lanes.values() for band in bands if band]
        formed = [min(item.arrived_s for item in batch) for batch in self._formed]
        return min([*heads, *formed], default=float("inf"))

    def add(self, item: T) -> None:
        """Append an item to its lane and band."""
        self._lanes[item.lane][bisect_left(self._bands, item.tokens)].append(item)
        self._count(item, 1)

    def form(self, batches: Iterable[list[T]]) -> None:
        """Put back whole batches, to run as they are and before anything else: what a fault was split into."""
        for batch in batches:
            self._formed.append(batch)
            for item in batch:
                self._count(item, 1)

    def is_full(self) -> bool:
        """Whether a whole batch waits."""
        budget = self._budget
        return bool(
            self._formed
            or self._tokens >= budget.tokens_max
            or self._cost_ms >= budget.cost_ms_max
            or self._items >= budget.items_max
        )

    def due_s(self) -> float:
        """When a batch should leave although it is not full and the device is busy; infinity when nothing waits."""
        return self.oldest_s + self._budget.max_wait_s

    def next_batch(self, is_live: Callable[[T], bool]) -> tuple[list[T], list[T]]:
        """Take a batch: (items to run, items found dead on the way). Both leave the batcher.

        An item over the budget by itself runs alone. The batch is empty only if no live item waits.
        """
        batch: list[T] = []
        dead: list[T] = []
        while self._formed and not batch:
            for item in self._formed.popleft():
                self._count(item, -1)
                (batch if is_live(item) else dead).append(item)
        if not batch:
            room = _Room(self._budget)
            for lane in self._lane_order():
                while (band := self._leading_band(lane, batch)) is not None:
                    self._fill(batch, dead, self._lanes[lane], leading=band, room=room, is_live=is_live)
                    if batch:
                        break
        return batch, dead

    def _leading_band(self, lane: Lane, batch: list[T]) -> int | None:
        """The band of the lane's oldest item; of a batch that another lane began, the band of its first item."""
        waiting = [index for index, band in enumerate(self._lanes[lane]) if band]
        if not waiting:
            return None
        if batch:
            return bisect_left(self._bands, batch[0].tokens)
        return min(waiting, key=lambda index: self._lanes[lane][index][0].arrived_s)

    def _fill(
        self,
        batch: list[T],
        dead: list[T],
        bands: list[deque[T]],
        *,
        leading: int,
        room: "_Room",
        is_live: Callable[[T], bool],
    ) -> None:
        """Take from the leading band, then from the others, nearest first, until the budget is spent."""
        for index in sorted(range(len(bands)), key=lambda index: abs(index - leading)):
            band = bands[index]
            while band:
                item = band[0]
                if not is_live(item):
                    dead.append(band.popleft())
                elif not room.takes(item):
                    return
                else:
                    batch.append(band.popleft())
                self._count(item, -1)

    def _lane_order(self) -> tuple[Lane, Lane]:
        if not any(self._lanes["bulk"]):
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
        self._cost_ms = self._cost_ms + sign * item.cost_ms if self._items else 0.0


class _Room:
    """What is left of a batch's budget. The first item always fits."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._tokens = 0
        self._items = 0
        self._cost_ms = 0.0

    def takes(self, item: Waiting) -> bool:
        """Take the item's share, if it is there."""
        tokens = self._tokens + item.tokens
        cost_ms = self._cost_ms + item.cost_ms
        budget = self._budget
        is_over = tokens > budget.tokens_max or cost_ms > budget.cost_ms_max or self._items >= budget.items_max
        if is_over and self._items:
            return False
        self._tokens, self._cost_ms, self._items = tokens, cost_ms, self._items + 1
        return True
