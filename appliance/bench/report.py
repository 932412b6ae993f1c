"""A result as text for a terminal. Pure."""

import math
from collections.abc import Sequence

from appliance.bench.session import Closed, Result, Side, Step

_OPEN_HEAD = (
    "load/s",
    "goodput/s",
    "texts/s",
    "p50 ms",
    "p95 ms",
    "p99 ms",
    "bad",
    "cpu ms/req",
    "cpu ms/text",
    "lag ms",
    "",
)
_CLOSED_HEAD = ("clients", *_OPEN_HEAD[1:])


def report(result: Result) -> str:
    """Tables, knees, ratios and the machine."""
    parts = [_side(side, result, number) for number, side in enumerate(result.sides, start=1)]
    if result.ratios:
        rows = [(name, f"{ratio:.3f}") for name, ratio in result.ratios.items()]
        parts.append("server 1 ÷ server 2\n" + table(("what", "ratio"), rows))
    parts.append(result.machine.line())
    return "\n\n".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns set right, but the first; no colour, so that it can be pasted."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        set_cells = [
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ]
        return "  ".join(set_cells).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *(line(row) for row in rows)])


def number(value: float | None) -> str:
    """Three or four digits; a dash for what is not known, ∞ for what did not come."""
    if value is None or math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def _side(side: Side, result: Result, position: int) -> str:
    is_closed = isinstance(result.plan.load, Closed)
    in_order = sorted(side.steps, key=lambda step: step.merged.load)
    marked = side.steps[side.knee_step] if side.knee_step is not None else None
    rows = [_row(step, is_closed=is_closed, is_knee=step is marked) for step in in_order]
    title = f"server {position}: {side.base_url}, {side.model}"
    lines = [title, table(_CLOSED_HEAD if is_closed else _OPEN_HEAD, rows), ""]
    if not is_closed:
        lines.append(_knee_line(side, slo_ms=1000 * result.plan.shape.slo_s))
    lines.append(f"saturation: {number(side.saturation)} requests/s, {number(side.saturation_texts_per_s)} texts/s")
    if not side.sees_cpu:
        lines.append(
            "server CPU: unknown; its processes are not on this machine, or --server-pid is needed to see them"
        )
    if side.is_client_bound:
        lines.append("WARNING: the client was the bottleneck; run it on another machine, or load less")
    lines += [f"not answered rightly: {reason}" for step in in_order for reason in step.reasons[:1]][:3]
    return "\n".join(lines)


def _row(step: Step, *, is_closed: bool, is_knee: bool) -> tuple[str, ...]:
    figures = step.merged
    bad = figures.late + figures.wrong + figures.refused + figures.failed + figures.unanswered + figures.timeout
    return (
        f"{step.asked:.0f}" if is_closed else number(figures.load),
        number(figures.goodput),
        number(figures.good_texts_per_s),
        number(figures.p50_ms),
        number(figures.p95_ms),
        number(figures.p99_ms),
        str(bad),
        number(figures.server_cpu_ms_per_request),
        number(figures.server_cpu_ms_per_text),
        number(figures.lag_p99_ms),
        "<- knee" if is_knee else "",
    )


def _knee_line(side: Side, *, slo_ms: float) -> str:
    check = (
        f"kneedle: {number(side.kneedle_load)}" if side.kneedle_load is not None else f"kneedle: {side.kneedle_note}"
    )
    if side.knee_load is None:
        return f"knee: none; the smallest load breaks p95 <= {slo_ms:.0f} ms or loses requests ({check})"
    return f"knee: {number(side.knee_load)} requests/s at p95 <= {slo_ms:.0f} ms ({check})"
