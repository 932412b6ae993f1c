"""How results read, and how two servers are compared."""

import math
from typing import Any  # any field of Figures

import msgspec
import pytest

from appliance.bench.figures import Figures, figures
from appliance.bench.report import number, table
from appliance.bench.server_cpu import is_local, spent_s
from appliance.bench.session import Side, Step, is_client_bound, ratios

NOTHING = figures([], window_s=1.0, slo_s=1.0, is_open=True, client_cpu_s=0.0, server_cpu_s=None)


def step(asked: float, **changes: Any) -> Step:
    base = msgspec.structs.replace(NOTHING, load=asked, goodput=asked, p50_ms=1.0, p95_ms=2.0, p99_ms=3.0)
    return Step(asked, msgspec.structs.replace(base, **changes), [], [])


def side(*steps: Step, knee_load: float | None = None) -> Side:
    best = max(each.merged.goodput for each in steps)
    return Side("http://a", "m", True, list(steps), None, knee_load, None, "", best, best, False)


def test_latencies_are_compared_at_the_largest_load_that_both_bear() -> None:
    ours = side(step(10), step(20, p95_ms=4.0), step(40, p95_ms=9.0), knee_load=40)
    theirs = side(step(10), step(20, p95_ms=8.0), step(40, p95_ms=900.0), knee_load=20)

    found = ratios(ours, theirs)

    assert found["knee"] == 2.0
    assert found["p95_ms"] == 0.5
    assert "server_cpu_ms_per_text" not in found, "unknown is not compared"


def test_what_was_not_answered_is_not_compared() -> None:
    broken = side(step(10, p99_ms=math.inf, goodput=0.0))

    assert ratios(side(step(10)), broken) == {}


@pytest.mark.parametrize(
    ("changes", "is_bound"),
    [({"lag_p99_ms": 5.0}, False), ({"lag_p99_ms": 5.1}, True), ({"client_cpu_share": 0.81}, True), ({}, False)],
)
def test_a_client_that_is_late_or_out_of_cpu_is_told_on(changes: dict[str, float], is_bound: bool) -> None:
    calm: Figures = msgspec.structs.replace(NOTHING, lag_p99_ms=0.0, client_cpu_share=0.1)

    assert is_client_bound(msgspec.structs.replace(calm, **changes), slo_ms=50.0) is is_bound


def test_tables_line_up() -> None:
    assert table(("what", "n"), [("a", "10"), ("long one", "1")]).splitlines() == [
        "what       n",
        "--------  --",
        "a         10",
        "long one   1",
    ]


@pytest.mark.parametrize(
    ("value", "text"), [(None, "-"), (math.nan, "-"), (math.inf, "∞"), (0.123, "0.12"), (12.34, "12.3"), (123.4, "123")]
)
def test_numbers(value: float | None, text: str) -> None:
    assert number(value) == text


def test_cpu_is_what_was_spent_between_two_looks() -> None:
    before = {(1, 0.0): 5.0, (2, 0.0): 7.0}
    after = {(1, 0.0): 6.0, (3, 9.0): 0.5}

    assert spent_s(before, after) == 1.5, "a new process counts in full, one that is gone is lost"


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False)])
def test_what_is_local(host: str, expected: bool) -> None:
    assert is_local(host) is expected
