"""A result as a picture: goodput and latency over load. The only module that knows matplotlib."""

import importlib.util
import math
from pathlib import Path

from appliance.bench.session import Result
from appliance.errors import StartupError

SUFFIXES = (".png", ".svg")


def check_plot(path: Path) -> None:
    """Before anything is measured: raise StartupError where the plot could not be drawn."""
    if path.suffix not in SUFFIXES:
        raise StartupError(f"a plot is written as {' or '.join(SUFFIXES)}, not {path.suffix or 'without a suffix'}")
    if importlib.util.find_spec("matplotlib") is None:
        raise StartupError("a plot needs matplotlib: pip install 'appliance[bench]'")


def draw(result: Result, path: Path) -> None:
    """Write the picture; its format goes by the suffix."""
    from matplotlib.figure import Figure  # noqa: PLC0415  # of the extra `bench`; without pyplot there is no global state

    picture = Figure(figsize=(8, 7), layout="constrained")
    goodput, latency = picture.subplots(2, 1, sharex=True)
    slo_ms = 1000 * result.plan.shape.slo_s
    for number, side in enumerate(result.sides, start=1):
        steps = sorted((step.merged for step in side.steps), key=lambda figures: figures.load)
        loads = [step.load for step in steps]
        name = f"server {number}: {side.base_url}"
        (line,) = goodput.plot(loads, [step.goodput for step in steps], marker="o", label=name)
        latency.plot(loads, [step.p50_ms for step in steps], color=line.get_color(), linestyle=":", label="p50")
        latency.plot(loads, [step.p95_ms for step in steps], color=line.get_color(), marker="o", label="p95")
        if side.knee_load is not None:
            for axes in (goodput, latency):
                axes.axvline(side.knee_load, color=line.get_color(), linestyle="--", linewidth=1)
    goodput.axline((0, 0), slope=1, color="grey", linewidth=0.8, label="all good")
    goodput.set_ylabel("goodput, requests/s")
    latency.set_ylabel("latency, ms")
    latency.set_xlabel("load, requests/s (dashed: the knee)")
    # Without an objective (closed loop) there is no line to draw.
    if math.isfinite(slo_ms):
        latency.axhline(slo_ms, color="grey", linewidth=0.8, label="p95 objective")
    latency.set_yscale("log")
    for axes in (goodput, latency):
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    picture.suptitle(result.machine.line(), fontsize="xx-small", wrap=True)
    picture.savefig(path)
