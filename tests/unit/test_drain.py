"""An honest `Retry-After`: from how fast jobs settle now, within bounds."""

import pytest

from appliance.gateway.drain import HALF_LIFE_S, SECONDS_MAX, SECONDS_MIN, DrainRate


def steady(jobs_per_s: float, *, seconds: float = 100.0) -> DrainRate:
    drain = DrainRate()
    for number in range(int(seconds * jobs_per_s)):
        drain.settled(1000.0 + number / jobs_per_s)
    return drain


@pytest.mark.parametrize("jobs_per_s", [1.0, 10.0, 100.0])
def test_a_steady_rate_is_known(jobs_per_s: float) -> None:
    assert steady(jobs_per_s).jobs_per_s(1100.0) == pytest.approx(jobs_per_s, rel=0.1)


def test_jobs_are_settled_at_that_rate() -> None:
    assert steady(10.0).seconds_to_drain(50, now_s=1100.0) == pytest.approx(5.0, rel=0.1)


def test_the_rate_fades_while_nothing_settles() -> None:
    drain = steady(10.0)

    assert drain.jobs_per_s(1100.0 + HALF_LIFE_S) == pytest.approx(drain.jobs_per_s(1100.0) / 2, rel=0.01)
    assert drain.seconds_to_drain(50, now_s=1100.0 + 1e6) == SECONDS_MAX


@pytest.mark.parametrize(("jobs", "seconds"), [(0, SECONDS_MIN), (1, SECONDS_MAX), (10**9, SECONDS_MAX)])
def test_nothing_settled_yet_gives_a_bound(jobs: int, seconds: float) -> None:
    assert DrainRate().seconds_to_drain(jobs, now_s=5.0) == seconds
    assert steady(10.0).seconds_to_drain(0, now_s=1100.0) == SECONDS_MIN
