"""From the outcomes of requests to the figures of a step. Pure.

Latency counts from the moment a request was *scheduled*, not from when it got onto the wire: a server that stalls makes
the requests behind the stall late too (no coordinated omission). A request that was not answered rightly has an
infinite latency, so that failing fast never looks like being fast.
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

Kind = Literal["right", "wrong", "refused", "failed", "unanswered", "timeout"]


class Outcome(msgspec.Struct, frozen=True):
    """One request. Times are in seconds from the start of the measured window."""

    scheduled_s: float
    finished_s: float
    kind: Kind
    texts: int
    tokens: int = 0
    lag_s: float = 0.0  # how late the client itself was in sending
    was_held: bool = False  # the bound on requests in flight kept it back
    reason: str = ""

    @property
    def latency_s(self) -> float:
        """Infinite unless the answer was right."""
        return self.finished_s - self.scheduled_s if self.kind == "right" else math.inf


class Figures(msgspec.Struct, frozen=True):
    """One step: requests scheduled in its window (open loop) or finished in it (closed loop).

    `load` and `goodput` are requests a second; good is: right, and within the objective. Infinity is null in JSON.
    """

    load: float
    goodput: float
    good_texts_per_s: float
    good_tokens_per_s: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    requests: int
    good: int
    late: int
    wrong: int
    refused: int
    failed: int
    unanswered: int
    timeout: int
    held: int
    lag_p99_ms: float
    client_cpu_share: float  # of one core
    server_cpu_s: float | None = None
    server_cpu_ms_per_request: float | None = None
    server_cpu_ms_per_text: float | None = None


def figures(
    outcomes: Sequence[Outcome],
    *,
    window_s: float,
    slo_s: float,
    is_open: bool,
    client_cpu_s: float,
    server_cpu_s: float | None,
) -> Figures:
    """The figures of a window of `window_s` seconds, out of all outcomes, warm-up included.

    CPU is set against the requests that finished in the window, since that is when it was spent.
    """
    finished = [outcome for outcome in outcomes if 0 <= outcome.finished_s < window_s]
    scheduled = [outcome for outcome in outcomes if 0 <= outcome.scheduled_s < window_s]
    counted = scheduled if is_open else finished
    good = [outcome for outcome in counted if outcome.latency_s <= slo_s]
    latencies_s = sorted(outcome.latency_s for outcome in counted)
    kinds = {kind: sum(outcome.kind == kind for outcome in counted) for kind in _KINDS}
    texts = sum(outcome.texts for outcome in finished if outcome.kind == "right")
    requests = sum(outcome.kind == "right" for outcome in finished)
    return Figures(
        load=len(counted) / window_s,
        goodput=len(good) / window_s,
        good_texts_per_s=sum(outcome.texts for outcome in good) / window_s,
        good_tokens_per_s=sum(outcome.tokens for outcome in good) / window_s,
        p50_ms=1000 * percentile(latencies_s, 0.50),
        p95_ms=1000 * percentile(latencies_s, 0.95),
        p99_ms=1000 * percentile(latencies_s, 0.99),
        requests=len(counted),
        good=len(good),
        late=kinds["right"] - len(good),
        wrong=kinds["wrong"],
        refused=kinds["refused"],
        failed=kinds["failed"],
        unanswered=kinds["unanswered"],
        timeout=kinds["timeout"],
        held=sum(outcome.was_held for outcome in counted),
        lag_p99_ms=1000 * percentile(sorted(outcome.lag_s for outcome in counted), 0.99),
        client_cpu_share=client_cpu_s / window_s,
        server_cpu_s=server_cpu_s,
        server_cpu_ms_per_request=_per(server_cpu_s, requests),
        server_cpu_ms_per_text=_per(server_cpu_s, texts),
    )


def percentile(ascending: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed (nearest rank); NaN of nothing."""
    if not ascending:
        return math.nan
    rank = max(1, math.ceil(share * len(ascending) - 1e-9))
    return ascending[rank - 1]


def merged(repeats: Sequence[Figures]) -> Figures:
    """Several runs of one step as one: counts add up, everything else is the median."""
    values = {
        field.name: [getattr(repeat, field.name) for repeat in repeats] for field in msgspec.structs.fields(Figures)
    }
    return msgspec.convert({name: _merged(each) for name, each in values.items()}, Figures)


def reasons(outcomes: Iterable[Outcome], *, count_max: int = 3) -> list[str]:
    """A few distinct reasons why requests were not answered rightly, in order of appearance."""
    return list(dict.fromkeys(outcome.reason for outcome in outcomes if outcome.reason))[:count_max]


_KINDS: tuple[Kind, ...] = ("right", "wrong", "refused", "failed", "unanswered", "timeout")


def _merged(values: Sequence[float | int | None]) -> float | int | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    if all(isinstance(value, int) for value in known):
        return sum(known)
    return statistics.median(known)


def _per(cpu_s: float | None, count: int) -> float | None:
    return 1000 * cpu_s / count if cpu_s is not None and count else None
