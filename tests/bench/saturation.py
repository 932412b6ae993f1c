"""What the appliance makes of the engine: texts a second end to end ÷ the engine's own best loop on the same cores.

    python -m tests.bench.saturation [--rounds 5] [--round-s 8] [--quick] [--json FILE]

The default model as it ships on this machine, 64 clients with one text a request and 4 clients with 64. The loop is
the engine object in processes of its own, from texts to vectors in batches of the same token budget and mix of lengths;
of the ways to share the cores out (one engine with all, one engine a core) the best counts. Rounds alternate. By the
clock the client and all of the appliance take their part of the same cores; by CPU time only the appliance is counted.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.bench.engine_child import LoopRound, layouts
from tests.bench.harness import Driven, Rounds, Row, drive, options, parsed, parts, real_appliance, report

LOADS = {"64 x 1 text": (64, 1, 0.90), "4 x 64 texts": (4, 64, 0.97)}


def main() -> None:
    found = parsed(options(__doc__, rounds=5, round_s=8.0))
    with tempfile.TemporaryDirectory() as folder, layouts() as engines, real_appliance(Path(folder)) as appliance:
        appliance.wait_ready()
        contenders: dict[str, Callable[[], Driven | LoopRound]] = {
            name: partial(
                drive,
                appliance.base_url,
                clients=clients,
                inputs=inputs,
                seconds=found.round_s,
                look=lambda: parts(appliance),
            )
            for name, (clients, inputs, _) in LOADS.items()
        }
        contenders |= {name: partial(engine.loop, found.round_s) for name, engine in engines.items()}
        rounds = Rounds(contenders, found.rounds)
    report("saturation", _rows(rounds, list(engines)), found)


def _rows(rounds: Rounds[Driven | LoopRound], loops: list[str]) -> list[Row]:
    by_clock = max(loops, key=lambda name: rounds.median(name, _texts_per_s))
    by_cpu = max(loops, key=lambda name: rounds.median(name, _texts_per_cpu_s))
    rows = [Row(f"loop, {name}", rounds.median(name, _texts_per_s), "texts/s") for name in loops]
    rows += [Row(f"loop, {name}", rounds.median(name, _texts_per_cpu_s), "texts/CPU s") for name in loops]
    for name, (_, _, target) in LOADS.items():
        clock, clock_spread = rounds.ratio(name, by_clock, _texts_per_s)
        cpu, cpu_spread = rounds.ratio(name, by_cpu, _texts_per_cpu_s)
        rows += [
            Row(f"{name}", rounds.median(name, _texts_per_s), "texts/s"),
            Row(f"{name}", rounds.median(name, _texts_per_cpu_s), "texts/CPU s"),
            Row(f"{name} / best loop, by the clock", clock, "x", target, spread=clock_spread),
            Row(f"{name} / best loop, by CPU time", cpu, "x", target, spread=cpu_spread),
        ]
    return rows


def _texts_per_s(round_: Driven | LoopRound) -> float:
    return round_.texts_per_s


def _texts_per_cpu_s(round_: Driven | LoopRound) -> float:
    return round_.texts_per_cpu_s


if __name__ == "__main__":
    main()
