"""Tallied figures reach prometheus_client as if each had been given to it at once."""

import asyncio

import prometheus_client
import pytest
from prometheus_client import REGISTRY

from appliance import tally
from appliance.tally import Counter, Histogram, Sum

BOUNDS = (0.5, 1.0, 2.0)
SEEN = [0.1, 0.5, 0.6, 1.0, 2.0, 2.1, 100.0]


def test_counts_arrive_with_a_flush_and_once() -> None:
    counter = Counter("tallied_total", "Of this test", ["kind"])
    counter.labels("a").inc()
    counter.labels("a").inc(2)
    counter.labels("b").inc()
    assert not REGISTRY.get_sample_value("tallied_total", {"kind": "a"})

    tally.flush()
    tally.flush()

    assert REGISTRY.get_sample_value("tallied_total", {"kind": "a"}) == 3
    assert REGISTRY.get_sample_value("tallied_total", {"kind": "b"}) == 1


def test_a_level_goes_up_and_down() -> None:
    level = Sum(prometheus_client.Gauge("tallied_level", "Of this test"))
    for step in (1, 1, -1):
        level.inc(step)
        tally.flush()

    assert REGISTRY.get_sample_value("tallied_level") == 1


def test_a_histogram_is_what_prometheus_would_have_made_of_it() -> None:
    ours = Histogram("tallied_ours", "Of this test", ["kind"], buckets=BOUNDS).labels("a")
    theirs = prometheus_client.Histogram("tallied_theirs", "Of this test", ["kind"], buckets=BOUNDS).labels("a")
    for amount in SEEN:
        ours.observe(amount)
        theirs.observe(amount)
        tally.flush()

    for suffix in ("sum", "count"):
        assert sample("ours", suffix) == pytest.approx(sample("theirs", suffix))
    for bound in ("0.5", "1.0", "2.0", "+Inf"):
        assert sample("ours", "bucket", le=bound) == sample("theirs", "bucket", le=bound)


async def test_what_is_counted_last_is_handed_over_at_the_end() -> None:
    counter = Counter("tallied_last_total", "Of this test", ["kind"])
    flushing = asyncio.create_task(tally.keep_flushed())
    await asyncio.sleep(0)
    counter.labels("a").inc()

    flushing.cancel()
    await asyncio.wait({flushing})

    assert REGISTRY.get_sample_value("tallied_last_total", {"kind": "a"}) == 1


def sample(whose: str, suffix: str, **labels: str) -> float:
    value = REGISTRY.get_sample_value(f"tallied_{whose}_{suffix}", {"kind": "a", **labels})
    assert value is not None
    return value
