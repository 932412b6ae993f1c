"""From outcomes to figures: late and lost requests are counted by kind and never make a percentile better."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bench.figures import Figures, Kind, Outcome, figures, merged, percentile, reasons


def outcome(at_s: float, latency_s: float = 0.01, kind: Kind = "right", *, texts: int = 1) -> Outcome:
    reason = "" if kind == "right" else f"because {kind}"
    return Outcome(at_s, at_s + latency_s, kind, texts, tokens=10 * texts, reason=reason)


def figures_of(
    outcomes: list[Outcome], *, is_open: bool = True, slo_s: float = 0.1, cpu_s: float | None = None
) -> Figures:
    return figures(outcomes, window_s=10.0, slo_s=slo_s, is_open=is_open, client_cpu_s=1.0, server_cpu_s=cpu_s)


def test_good_is_right_and_in_time() -> None:
    kinds: list[Kind] = ["wrong", "refused", "failed", "unanswered", "timeout"]
    outcomes = [outcome(1), outcome(0, 0.1), outcome(0, 0.11), *(outcome(4, 0.001, kind) for kind in kinds)]

    found = figures_of(outcomes)

    assert (found.requests, found.good, found.late) == (8, 2, 1)
    assert (found.load, found.goodput) == (0.8, 0.2)
    assert [getattr(found, kind) for kind in kinds] == [1] * 5
    assert reasons(outcomes) == ["because wrong", "because refused", "because failed"]


def test_a_failure_is_infinitely_late_however_fast_it_came() -> None:
    found = figures_of([outcome(1, 0.02)] * 94 + [outcome(1, 0.001, "refused")] * 6)

    assert found.p50_ms == pytest.approx(20)
    assert math.isinf(found.p95_ms)


def test_an_open_loop_counts_what_was_scheduled_in_the_window_whenever_it_ended() -> None:
    found = figures_of([outcome(-0.5, 1.0), outcome(9.9, 5.0), outcome(10.0)])

    assert (found.requests, found.late) == (1, 1)


def test_a_closed_loop_counts_what_finished_in_the_window() -> None:
    found = figures_of([outcome(-0.5, 1.0), outcome(9.9, 5.0), outcome(-2.0, 1.0)], is_open=False, slo_s=math.inf)

    assert (found.requests, found.good) == (1, 1)


def test_cpu_is_shared_among_what_was_answered_meanwhile() -> None:
    outcomes = [outcome(1, texts=4)] * 10 + [outcome(9.99, 1.0, texts=4), outcome(1, kind="failed", texts=4)]

    found = figures_of(outcomes, cpu_s=2.0)

    assert found.server_cpu_ms_per_request == pytest.approx(200)
    assert found.server_cpu_ms_per_text == pytest.approx(50)
    assert found.client_cpu_share == pytest.approx(0.1)
    assert figures_of(outcomes).server_cpu_ms_per_text is None, "a server elsewhere has no CPU to see"
    assert figures_of([], cpu_s=2.0).server_cpu_ms_per_text is None, "nothing to share it among"


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.99, 5.0),
        ([1.0, 2.0], 0.5, 1.0),
        ([1.0, 2.0], 0.51, 2.0),
        ([float(n) for n in range(1, 101)], 0.95, 95.0),
    ],
)
def test_percentiles(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == expected


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200), st.floats(0.01, 1.0))
def test_a_percentile_is_the_smallest_value_that_covers_its_share(values: list[float], share: float) -> None:
    ascending = sorted(values)

    found = percentile(ascending, share)

    assert found in values
    assert sum(value <= found for value in values) / len(values) >= share - 1e-9
    assert sum(value < found for value in values) / len(values) < share


def test_repeats_become_medians_and_sums() -> None:
    repeats = [
        figures_of([outcome(1, latency)] * 10, cpu_s=cpu) for latency, cpu in ((0.01, 1.0), (0.02, 9.0), (0.5, 2.0))
    ]

    found = merged(repeats)

    assert found.p50_ms == pytest.approx(20)
    assert found.server_cpu_s == 2.0
    assert (found.requests, found.late) == (30, 10)
    assert merged([figures_of([outcome(1)])]).server_cpu_s is None
    assert math.isnan(merged([figures_of([])]).p95_ms)
