"""The knee is where the definition puts it, and the search finds it wherever it lies."""

import math
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bench.knee import RESOLUTION, knee, kneedle, marginal, next_rate


class Point(msgspec.Struct, frozen=True):
    load: float
    goodput: float
    p95_ms: float


def points(*values: tuple[float, float, float]) -> list[Point]:
    return [Point(*each) for each in values]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([], None),
        (points((10, 10, 5)), 0),
        (points((10, 10, 101)), None),
        (points((10, 8.9, 5)), None),  # a tenth of the first requests is lost already
        (points((10, 10, 5), (20, 20, 100), (40, 39, 101)), 1),
        (points((10, 10, 5), (20, 18.9, 50)), 0),  # 0.89 of the added requests
        (points((10, 10, 5), (20, 19, 50)), 1),
        (points((20, 20, 5), (10, 10, 5)), 0),  # in any order
        (points((100, 100, 5), (105, 101, 50)), 1),  # too close for a marginal of its own: counted from zero
        (points((10, 10, 5), (20, 20, math.inf)), 0),
        (points((0, 0, math.nan)), None),
    ],
)
def test_the_knee_is_the_largest_load_that_is_borne(steps: list[Point], expected: int | None) -> None:
    assert knee(steps, slo_ms=100) == expected


def test_a_marginal_is_taken_to_the_next_load_that_is_clearly_smaller() -> None:
    steps = points((50, 50, 1), (91, 91, 1), (100, 95, 1))

    assert marginal(steps[2], steps) == pytest.approx((95 - 50) / (100 - 50))


@given(st.floats(0.2, 20_000), st.floats(0.5, 100))
def test_the_search_closes_in_on_any_capacity(capacity: float, first: float) -> None:
    tried: list[tuple[float, bool]] = []
    while (rate := next_rate(tried, first=first)) is not None:
        tried.append((rate, rate <= capacity))
        assert len(tried) < 60

    best = max(rate for rate, is_borne in tried if is_borne)
    assert best <= capacity <= best * (1 + RESOLUTION) * 1.0001


@given(st.lists(st.booleans(), min_size=60, max_size=60))
def test_the_search_ends_even_when_the_answers_are_noise(answers: Sequence[bool]) -> None:
    tried: list[tuple[float, bool]] = []
    for is_borne in answers:
        rate = next_rate(tried, first=8.0)
        if rate is None:
            return
        assert rate > 0
        tried.append((rate, is_borne))
    pytest.fail("the search did not end")


def test_kneedle_finds_the_bend_and_says_when_there_is_none() -> None:
    pytest.importorskip("kneed")
    bent = points(*((load, load, 5 if load <= 160 else 5 + (load - 160) * 5) for load in range(20, 241, 20)))

    assert kneedle(bent) == pytest.approx(160, abs=20)
    assert kneedle(points(*((load, load, 5.0) for load in range(1, 9)))) is None
    assert kneedle(bent[:3]) is None
