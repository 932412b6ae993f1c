"""The knee of a server: the largest load that it still bears. And which load to try next to find it. Pure.

knee = the largest load with p95 within the objective and a marginal goodput dG/dL of at least 0.9: of the requests that
were added to get there, nine in ten were answered well. Saturation = the largest goodput, at whatever load.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Protocol

from appliance.bench.schedule import RATE_MAX

MARGINAL_MIN = 0.9
APART = 0.9  # a marginal is taken to a load at most this share of the own: closer ones differ by noise alone
RESOLUTION = 0.05  # the search stops when a passing and a failing load are this close
RATE_MIN = 0.05  # requests a second
KNEEDLE_POINTS_MIN = 4


class Step(Protocol):
    """What must be known of a step: requests a second, and milliseconds."""

    @property
    def load(self) -> float: ...

    @property
    def goodput(self) -> float: ...

    @property
    def p95_ms(self) -> float: ...


def passes(step: Step, steps: Sequence[Step], *, slo_ms: float) -> bool:
    """Whether the load of `step` is borne, given all steps so far."""
    return step.p95_ms <= slo_ms and marginal(step, steps) >= MARGINAL_MIN


def marginal(step: Step, steps: Sequence[Step]) -> float:
    """dG/dL towards the largest load that is clearly smaller; towards no load at all where there is none."""
    lower = max(
        (other for other in steps if other.load <= APART * step.load), key=lambda other: other.load, default=None
    )
    if lower is None:
        return step.goodput / step.load if step.load else 0.0
    return (step.goodput - lower.goodput) / (step.load - lower.load)


def knee(steps: Sequence[Step], *, slo_ms: float) -> int | None:
    """The position of the knee among the steps; None where the smallest load is too much already."""
    borne = [number for number, step in enumerate(steps) if passes(step, steps, slo_ms=slo_ms)]
    return max(borne, key=lambda number: steps[number].load, default=None)


def next_rate(tried: Sequence[tuple[float, bool]], *, first: float, resolution: float = RESOLUTION) -> float | None:
    """The rate to try after these (rate, whether it was borne); None when the knee is known well enough.

    Doubles from `first` until a rate fails (or halves until one passes), then bisects, geometrically.
    """
    failed = min((rate for rate, is_borne in tried if not is_borne), default=math.inf)
    borne = max((rate for rate, is_borne in tried if is_borne and rate < failed), default=0.0)
    if not tried:
        return first
    if failed == math.inf:
        return min(2 * borne, RATE_MAX) if borne < RATE_MAX else None
    if borne == 0.0:
        return max(failed / 2, RATE_MIN) if failed > RATE_MIN else None
    return math.sqrt(failed * borne) if failed > borne * (1 + resolution) else None


def kneedle(steps: Sequence[Step]) -> float | None:
    """The load at the knee of the curve of p95 over load by kneedle (S = 1), as a cross-check that knows no objective.

    None where the curve has none, or fewer than four points with an answer. Raises ImportError without `kneed`.
    """
    from kneed import KneeLocator  # noqa: PLC0415  # of the extra `bench`

    points = sorted({step.load: step.p95_ms for step in steps if math.isfinite(step.p95_ms)}.items())
    loads, p95s_ms = [load for load, _ in points], [p95_ms for _, p95_ms in points]
    if len(points) < KNEEDLE_POINTS_MIN or min(p95s_ms) == max(p95s_ms):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it found none
        found = KneeLocator(loads, p95s_ms, S=1.0, curve="convex", direction="increasing").knee
    return None if found is None else float(found)
