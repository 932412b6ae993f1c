"""A whole measurement: the steps of one server, or of two in turn, and what they add up to.

Two servers are measured alternately, repeat by repeat, so that whatever else happens on the machine hits both alike.
"""

import math
from collections.abc import Callable, Sequence

import msgspec

from appliance.bench.figures import Figures, merged
from appliance.bench.knee import knee, kneedle, next_rate, passes
from appliance.bench.load import Loader, Server, Shape
from appliance.bench.machine import Machine, this_machine
from appliance.bench.schedule import AutoRate, RampRate, Rates

STEPS_MAX = 60  # of one server's search
LAG_MS_MAX = 10.0  # beyond, or beyond a tenth of the objective, the client itself is late
CLIENT_CPU_SHARE_MAX = 0.8  # of one core

Progress = Callable[[str], None]


class Closed(msgspec.Struct, frozen=True, tag="closed"):
    """Closed loop: so many clients, each with one request at a time."""

    clients: int


class Plan(msgspec.Struct, frozen=True):
    """What to do. `load` is open loop for rates, closed for clients."""

    shape: Shape
    load: Rates | Closed
    repeats: int
    seed: int


class Step(msgspec.Struct, frozen=True):
    """One load: the repeats as one (`merged`), and each."""

    asked: float  # requests a second, or clients
    merged: Figures
    repeats: list[Figures]
    reasons: list[str]


class Side(msgspec.Struct, frozen=True):
    """What was found of one server. The knees are loads in requests a second; `knee_step` is a position in `steps`."""

    base_url: str
    model: str
    sees_cpu: bool
    steps: list[Step]
    knee_step: int | None
    knee_load: float | None
    kneedle_load: float | None
    kneedle_note: str
    saturation: float  # the largest goodput, requests a second
    saturation_texts_per_s: float
    is_client_bound: bool  # the client was late or short of CPU in a step that counts


class Result(msgspec.Struct, frozen=True):
    """All of a run, as written to JSON. `ratios` are first server ÷ second, from one run."""

    machine: Machine
    plan: Plan
    sides: list[Side]
    ratios: dict[str, float]


async def measure(plan: Plan, servers: Sequence[Server], *, progress: Progress) -> Result:
    """Measure one server, or two in turn. Raises Unanswered when one does not answer rightly at all."""
    machine = this_machine()
    loaders = [Loader(server, plan.shape) for server in servers]
    for loader in loaders:
        await loader.reach()
    steps: list[list[Step]] = [[] for _ in servers]
    for number in range(STEPS_MAX):
        asked = [_next(plan, each) for each in steps]
        if all(each is None for each in asked):
            break
        taken = await _step(plan, loaders, asked, number=number, progress=progress)
        for position, step in taken.items():
            steps[position].append(step)
            progress(_said(servers[position], step, plan))
    sides = [_side(server, loader, each, plan) for server, loader, each in zip(servers, loaders, steps, strict=True)]
    return Result(machine, plan, sides, ratios(*sides) if len(sides) == 2 else {})


async def _step(
    plan: Plan, loaders: Sequence[Loader], asked: Sequence[float | None], *, number: int, progress: Progress
) -> dict[int, Step]:
    """One step of each server that still has one, alternating by repeat; by position of the server."""
    figures: dict[int, list[Figures]] = {}
    why: dict[int, list[str]] = {}
    for repeat in range(plan.repeats):
        for position, (loader, load) in enumerate(zip(loaders, asked, strict=True)):
            if load is None:
                continue
            unit = "clients" if isinstance(plan.load, Closed) else "requests/s"
            progress(f"server {position + 1}: {load:.4g} {unit}, {repeat + 1} of {plan.repeats} …\r")
            # The same seed for both servers: they get the same requests at the same times.
            seed = plan.seed + 1000 * number + repeat
            if isinstance(plan.load, Closed):
                measured = await loader.closed_loop(int(load), seed=seed)
            else:
                measured = await loader.open_loop(load, seed=seed)
            figures.setdefault(position, []).append(measured.figures)
            why.setdefault(position, []).extend(measured.reasons)
    return {
        position: Step(asked[position] or 0.0, merged(each), each, list(dict.fromkeys(why[position])))
        for position, each in figures.items()
    }


def _next(plan: Plan, steps: Sequence[Step]) -> float | None:
    """The load of a server's next step; None when it has none left."""
    match plan.load:
        case Closed(clients=clients):
            return float(clients) if not steps else None
        case RampRate(rates=rates):
            return rates[len(steps)] if len(steps) < len(rates) else None
        case AutoRate(first=first):
            slo_ms = 1000 * plan.shape.slo_s
            all_figures = [step.merged for step in steps]
            return next_rate(
                [(step.asked, passes(step.merged, all_figures, slo_ms=slo_ms)) for step in steps], first=first
            )


def _side(server: Server, loader: Loader, steps: list[Step], plan: Plan) -> Side:
    all_figures = [step.merged for step in steps]
    is_open = not isinstance(plan.load, Closed)
    at = knee(all_figures, slo_ms=1000 * plan.shape.slo_s) if is_open else None
    check, note = _kneedle(all_figures) if is_open else (None, "")
    best = max(all_figures, key=lambda each: each.goodput)
    counted = [best] if at is None else [best, all_figures[at]]
    return Side(
        base_url=server.base_url,
        model=server.model,
        sees_cpu=loader.sees_cpu,
        steps=steps,
        knee_step=at,
        knee_load=None if at is None else all_figures[at].load,
        kneedle_load=check,
        kneedle_note=note,
        saturation=best.goodput,
        saturation_texts_per_s=max(each.good_texts_per_s for each in all_figures),
        is_client_bound=any(is_client_bound(each, slo_ms=1000 * plan.shape.slo_s) for each in counted),
    )


def is_client_bound(step: Figures, *, slo_ms: float) -> bool:
    """Whether the client, not the server, is what this step shows."""
    lag_ms_max = min(LAG_MS_MAX, slo_ms / 10)
    return step.lag_p99_ms > lag_ms_max or step.client_cpu_share > CLIENT_CPU_SHARE_MAX


def ratios(first: Side, second: Side) -> dict[str, float]:
    """First ÷ second: of the knees and saturations, and of latencies and CPU at the largest load that both bear.

    Where no load is common to both (closed loop has one), latencies and CPU are not compared.
    """
    pairs: dict[str, tuple[float | None, float | None]] = {
        "knee": (first.knee_load, second.knee_load),
        "saturation": (first.saturation, second.saturation),
    }
    common = _common(first, second)
    if common is not None:
        for name in ("p50_ms", "p95_ms", "p99_ms", "server_cpu_ms_per_request", "server_cpu_ms_per_text"):
            pairs[name] = (getattr(common[0], name), getattr(common[1], name))
    return {
        name: upper / lower
        for name, (upper, lower) in pairs.items()
        if upper is not None and lower and math.isfinite(upper) and math.isfinite(lower)
    }


def _common(first: Side, second: Side) -> tuple[Figures, Figures] | None:
    ours, theirs = ({step.asked: step.merged for step in side.steps} for side in (first, second))
    shared = [asked for asked in ours if asked in theirs]
    borne = [asked for asked in shared if math.isfinite(ours[asked].p99_ms) and math.isfinite(theirs[asked].p99_ms)]
    knees = [side.knee_load for side in (first, second) if side.knee_load is not None]
    # A rate drawn at random is a little off the rate asked for.
    below = [asked for asked in borne if not knees or asked <= 1.1 * min(knees)]
    asked = max(below or borne, default=None)
    return None if asked is None else (ours[asked], theirs[asked])


def _kneedle(steps: Sequence[Figures]) -> tuple[float | None, str]:
    try:
        found = kneedle(steps)
    except ImportError:
        return None, "kneed is not installed: pip install 'appliance[bench]'"
    return found, "" if found is not None else "no knee in this curve"


def _said(server: Server, step: Step, plan: Plan) -> str:
    unit = "clients" if isinstance(plan.load, Closed) else "requests/s"
    figures = step.merged
    why = f"; {step.reasons[0]}" if step.reasons else ""
    return (
        f"{server.base_url}: {step.asked:.4g} {unit}: goodput {figures.goodput:.4g}/s, p95 {figures.p95_ms:.1f} ms{why}"
    )
