"""Devices that share one local queue: who takes what, by predicted finish."""

import heapq

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.workers.exchange import Exchange


def exchange_of(*names: str, slow: dict[str, float] | None = None) -> Exchange:
    """Devices of these names; `slow` ones have shown how slow they are."""
    exchange = Exchange()
    for name in names:
        exchange.join(name)
        for _ in range(200 if slow and name in slow else 0):
            exchange.sent(name, 1.0, now_s=0.0)
            exchange.done(name, now_s=0.0, measured_s=(slow or {})[name])
    return exchange


def test_a_lone_device_takes_everything() -> None:
    exchange = exchange_of("a")
    assert exchange.takes("a", batch_s=1.0, waiting_s=1.0, now_s=0.0)


@pytest.mark.parametrize("count", [2, 3, 8])
def test_of_idle_devices_any_takes_a_lone_batch(count: int) -> None:
    names = [str(number) for number in range(count)]
    exchange = exchange_of(*names)

    assert all(exchange.takes(name, batch_s=1.0, waiting_s=1.0, now_s=0.0) for name in names)


@settings(deadline=None, max_examples=100)
@given(
    st.lists(st.tuples(st.floats(0.1, 10), st.lists(st.floats(0.001, 5), max_size=3)), min_size=1, max_size=6),
    st.floats(0.001, 5),
    st.floats(1, 20),
)
def test_whatever_they_are_doing_one_of_them_takes_what_waits(
    places: list[tuple[float, list[float]]], batch_s: float, backlog: float
) -> None:
    names = [str(number) for number in range(len(places))]
    slow = {name: slowness for name, (slowness, _) in zip(names, places, strict=True)}
    exchange = exchange_of(*names, slow=slow)
    for name, (_, running) in zip(names, places, strict=True):
        for running_s in running:
            exchange.sent(name, running_s, now_s=0.0)

    waiting_s = batch_s * backlog
    assert any(exchange.takes(name, batch_s=batch_s, waiting_s=waiting_s, now_s=0.0) for name in names)


def test_the_idle_one_of_two_takes_and_the_busy_one_does_not() -> None:
    exchange = exchange_of("a", "b")
    exchange.sent("a", 1.0, now_s=0.0)

    assert not exchange.takes("a", batch_s=0.5, waiting_s=0.5, now_s=0.0)
    assert exchange.takes("b", batch_s=0.5, waiting_s=0.5, now_s=0.0)


def test_both_are_fed_ahead_when_much_waits() -> None:
    exchange = exchange_of("a", "b")
    exchange.sent("a", 1.0, now_s=0.0)
    exchange.sent("b", 1.0, now_s=0.0)

    assert exchange.takes("a", batch_s=1.0, waiting_s=2.0, now_s=0.0)
    assert exchange.takes("b", batch_s=1.0, waiting_s=2.0, now_s=0.0)


def test_a_slow_device_keeps_out_of_the_way_until_there_is_work_for_it() -> None:
    exchange = exchange_of("fast", "slow", slow={"slow": 4.0})

    assert not exchange.takes("slow", batch_s=1.0, waiting_s=1.0, now_s=0.0)
    assert exchange.takes("fast", batch_s=1.0, waiting_s=1.0, now_s=0.0)
    assert exchange.takes("slow", batch_s=1.0, waiting_s=6.0, now_s=0.0)


def test_work_in_hand_shrinks_with_time() -> None:
    exchange = exchange_of("a", "b")
    exchange.sent("a", 1.0, now_s=0.0)
    assert exchange.free_s("a") == pytest.approx(1.0)

    exchange.sent("b", 0.1, now_s=0.0)
    exchange.done("b", now_s=0.95, measured_s=0.1)
    assert exchange.takes("a", batch_s=0.5, waiting_s=1.0, now_s=0.95)


def test_a_device_that_is_down_counts_for_nothing_and_keeps_its_record() -> None:
    exchange = exchange_of("fast", "slow", slow={"slow": 4.0})
    exchange.leave("fast")
    assert exchange.takes("slow", batch_s=1.0, waiting_s=1.0, now_s=0.0)

    exchange.done("fast", now_s=1.0, measured_s=1.0)  # an answer that came too late
    exchange.leave("slow")
    exchange.join("slow")
    exchange.join("fast")
    assert not exchange.takes("slow", batch_s=1.0, waiting_s=1.0, now_s=0.0)


@pytest.mark.parametrize(
    ("speeds", "share"), [((1.0, 1.0), 0.95), ((1.0, 1.0, 1.0, 1.0), 0.95), ((4.0, 1.0), 0.9), ((3.0, 2.0, 1.0), 0.9)]
)
def test_simulated_devices_of_any_speed_are_kept_busy_under_load(speeds: tuple[float, ...], share: float) -> None:
    """A hundred equal batches wait: the time they take ÷ the best possible is at least `share`."""
    slow = {str(number): 1 / speed for number, speed in enumerate(speeds)}
    exchange = exchange_of(*slow, slow=slow)
    waiting, now_s = 100, 0.0
    running: list[tuple[float, str]] = []
    while waiting or running:
        for name, batch_s in slow.items():
            busy = any(other == name for _, other in running)
            if waiting and not busy and exchange.takes(name, batch_s=1.0, waiting_s=float(waiting), now_s=now_s):
                exchange.sent(name, 1.0, now_s=now_s)
                heapq.heappush(running, (now_s + batch_s, name))
                waiting -= 1
        now_s, name = heapq.heappop(running)
        exchange.done(name, now_s=now_s, measured_s=slow[name])

    assert 100 / sum(speeds) / now_s >= share
