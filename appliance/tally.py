"""Counters and histograms that cost a request next to nothing.

They count in plain numbers, and `flush` adds those to prometheus_client's, whose shared files take microseconds a time.
For the event loop's thread only: counting and flushing on two threads would lose counts.
"""

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import prometheus_client

FLUSH_INTERVAL_S = 0.2


class _Series(Protocol):
    """The figures of one set of labels."""

    def flush(self) -> None:
        """Hand over what was counted since the last time."""


S = TypeVar("S", bound=_Series)

_all: list[_Series] = []


class Sum:
    """A number that goes up, or up and down."""

    __slots__ = ("_amount", "_metric")

    def __init__(self, metric: prometheus_client.Counter | prometheus_client.Gauge) -> None:
        self._metric = metric
        self._amount = 0.0
        _all.append(self)

    def inc(self, amount: float = 1) -> None:
        """Add to it."""
        self._amount += amount

    def flush(self) -> None:
        """Hand over what was counted since the last time."""
        if self._amount:
            self._metric.inc(self._amount)
            self._amount = 0.0


class Distribution:
    """How many observations fell into each bucket, and their sum."""

    __slots__ = ("_bounds", "_counts", "_metric", "_sum")

    def __init__(self, metric: prometheus_client.Histogram, bounds: Sequence[float]) -> None:
        self._metric = metric
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # one above all bounds
        self._sum = 0.0
        _all.append(self)

    def observe(self, amount: float) -> None:
        """Note one observation."""
        self._counts[bisect_left(self._bounds, amount)] += 1
        self._sum += amount

    def flush(self) -> None:
        """Hand over what was observed since the last time.

        By prometheus_client's own parts of a histogram: its `observe` takes one at a time.
        """
        if not any(self._counts):
            return
        self._metric._sum.inc(self._sum)
        for bucket, count in zip(self._metric._buckets, self._counts, strict=True):
            if count:
                bucket.inc(count)
        self._counts = [0] * len(self._counts)
        self._sum = 0.0


class _Labelled(Generic[S]):
    """The series of one metric, by the values of its labels."""

    def __init__(self, new: Callable[[tuple[str, ...]], S]) -> None:
        self._new = new
        self._series: dict[tuple[str, ...], S] = {}

    def labels(self, *values: str) -> S:
        """The series of these values, in the order of the labels' names."""
        series = self._series.get(values)
        if series is None:
            series = self._series[values] = self._new(values)
        return series


class Counter(_Labelled[Sum]):
    """A counter with labels."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str]) -> None:
        metric = prometheus_client.Counter(name, documentation, labels)
        super().__init__(lambda values: Sum(metric.labels(*values)))


class Histogram(_Labelled[Distribution]):
    """A histogram with labels."""

    def __init__(self, name: str, documentation: str, labels: Sequence[str], *, buckets: Sequence[float]) -> None:
        metric = prometheus_client.Histogram(name, documentation, labels, buckets=buckets)
        super().__init__(lambda values: Distribution(metric.labels(*values), buckets))


def flush() -> None:
    """Hand over everything that was counted since the last time."""
    for series in _all:
        series.flush()


async def keep_flushed() -> None:
    """Flush from time to time until cancelled, and once more then."""
    try:
        while True:
            await asyncio.sleep(FLUSH_INTERVAL_S)
            flush()
    finally:
        flush()
