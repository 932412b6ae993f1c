"""How a pull asks: never for more than wished, never for nothing while there is a wish."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.queue.demand import EXPIRES_S, HEARTBEAT_S, SILENCE_MAX_S, Demand
from appliance.settings import QueueSettings


def test_a_node_that_stands_still_gets_no_job_twice() -> None:
    assert QueueSettings().ack_wait_s > EXPIRES_S
    assert 2 * HEARTBEAT_S <= EXPIRES_S  # or the server refuses the request


def test_the_whole_wish_is_asked_for_once() -> None:
    demand = Demand(now=0)
    assert demand.ask(now=0) == 0
    demand.want(10)
    assert (demand.ask(now=0), demand.ask(now=0)) == (10, 0)


@pytest.mark.parametrize(("wish", "more", "asked"), [(1, 2, 1), (4, 8, 4), (5, 9, 0), (4, 4, 0), (4, 2, 0), (4, 0, 0)])
def test_a_raised_wish_is_topped_up_from_half_on(wish: int, more: int, asked: int) -> None:
    demand = Demand(now=0)
    demand.want(wish)
    demand.ask(now=0)
    demand.want(more)
    assert demand.ask(now=0) == asked


def test_an_expired_request_is_asked_again_for_what_was_not_served() -> None:
    demand = Demand(now=0)
    demand.want(10)
    demand.ask(now=0)
    for _ in range(4):
        demand.delivered(now=1)
    demand.ended(6, now=30)
    assert demand.ask(now=30) == 6


def test_a_lost_request_is_asked_again_and_a_withdrawn_wish_is_not() -> None:
    demand = Demand(now=0)
    demand.want(10)
    demand.ask(now=0)
    demand.lost()
    assert demand.ask(now=1) == 10
    demand.want(0)
    demand.lost()
    assert demand.ask(now=2) == 0


def test_silence_counts_from_the_last_sign_of_life_and_only_while_something_is_outstanding() -> None:
    demand = Demand(now=0)
    assert not demand.is_silent(now=1000)
    demand.want(2)
    demand.ask(now=1000)
    assert not demand.is_silent(now=1000 + SILENCE_MAX_S)
    assert demand.is_silent(now=1000 + SILENCE_MAX_S + 0.1)
    demand.heartbeat(now=1010)
    assert not demand.is_silent(now=1010 + SILENCE_MAX_S)
    demand.delivered(now=1011)
    demand.delivered(now=1012)
    assert not demand.is_silent(now=5000)


@given(st.lists(st.one_of(st.integers(0, 50), st.just("delivered"), st.just("expired")), max_size=60))
def test_the_server_never_owes_more_than_the_largest_wish_and_never_nothing_while_there_is_one(
    steps: list[int | str],
) -> None:
    demand = Demand(now=0)
    wish = owed = largest = 0
    for step in steps:
        if step == "delivered":
            if owed == 0:
                continue
            owed, wish = owed - 1, max(0, wish - 1)
            demand.delivered(now=0)
        elif step == "expired":
            demand.ended(owed, now=0)
            owed = 0
        else:
            assert isinstance(step, int)
            wish, largest = step, max(largest, step)
            demand.want(step)
        owed += demand.ask(now=0)
        assert owed <= largest
        assert owed > 0 or wish == 0
