"""CPU per request outside the engine: gateway, NATS and worker, with an engine that computes nothing.

    python -m tests.bench.overhead [--rounds 5] [--round-s 6] [--quick] [--json FILE]
    python -m tests.bench.overhead --profile gateway|worker     where the time goes: the part runs under cProfile

64 clients with one text a request, then 16 with 64 texts. The engine and the client are not counted. Texts have 8
tokens, since tokenizing is work on the text itself, shown for the usual mix of lengths. Their words are few, so the
node soon knows all of them (workers/word_ids.py): texts with new words cost up to 1.4 us a token more. cProfile slows
the profiled part down about twofold and sees its main thread only: read shares from it, not times.
"""

import argparse
import contextlib
import pstats
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import msgspec

from tests.appliance_process import ApplianceProcess
from tests.bench.harness import (
    MODEL,
    Driven,
    Rounds,
    Row,
    drive,
    fake_appliance,
    options,
    parsed,
    parts,
    report,
)
from tests.fake_model import fake_config
from tests.nats import NatsServer

PARTS = ("gateway", "nats", "worker")
PROFILE_LINES = 40
NOT_STARTUP = r"^(?!.*(importlib|_imp\.|builtins\.(exec|compile|__build_class__)|marshal|/re/|typing|dataclasses))"


class Case(msgspec.Struct, frozen=True):
    """One shape of request; without a target it is for information."""

    name: str
    clients: int
    inputs: int
    tokens: int | None
    us_a_text_max: float | None = None


CASES = (
    Case("1 text a request", 64, 1, 8, 250.0),
    Case("64 texts a request", 16, 64, 8, 30.0),
    Case("64 texts of mixed lengths", 16, 64, None),
)


def main() -> None:
    parser = options(__doc__, rounds=5, round_s=6.0)
    parser.add_argument("--profile", choices=["gateway", "worker"])
    parser.add_argument("--profile-inputs", type=int, default=1, help="texts a request while profiling")
    found = parsed(parser)
    with tempfile.TemporaryDirectory() as folder:
        if found.profile:
            _profile(Path(folder), found)
            return
        with fake_appliance(Path(folder)) as appliance:
            appliance.wait_ready()
            contenders = {
                case.name: partial(
                    drive,
                    appliance.base_url,
                    clients=case.clients,
                    inputs=case.inputs,
                    seconds=found.round_s,
                    look=partial(parts, appliance),
                    tokens=case.tokens,
                )
                for case in CASES
            }
            rounds = Rounds(contenders, found.rounds)
    report("overhead", [row for case in CASES for row in _rows(rounds, case)], found)


def _rows(rounds: Rounds[Driven], case: Case) -> list[Row]:
    def part_us(part: str) -> float:
        return rounds.median(case.name, lambda each: 1e6 * each.cpu_s.get(part, 0.0) / each.texts)

    def all_us(each: Driven) -> float:
        return 1e6 * sum(each.cpu_s[part] for part in PARTS) / each.texts

    totals = [all_us(each) for each in rounds.of[case.name]]
    rows = [
        Row(
            f"{case.name}: all",
            statistics.median(totals),
            "us/text",
            at_most=case.us_a_text_max,
            spread=(min(totals), max(totals)),
        )
    ]
    rows += [Row(f"{case.name}: {part}", part_us(part), "us/text") for part in (*PARTS, "engine", "supervisor")]
    client_us = rounds.median(case.name, lambda each: 1e6 * each.client_cpu_s / each.texts)
    rows.append(Row(f"{case.name}: client", client_us, "us/text"))
    rows.append(Row(f"{case.name}: served", rounds.median(case.name, lambda each: each.texts_per_s), "texts/s"))
    return rows


def _profile(folder: Path, found: argparse.Namespace) -> None:
    """Gateway and worker apart, one of them under cProfile, and its hottest functions by their own time."""
    profile = folder / "profile"
    nats_folder = folder / "nats"
    nats_folder.mkdir()
    config = fake_config(folder / "model", alias=MODEL)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(NatsServer(nats_folder))
        running = {
            part: stack.enter_context(
                ApplianceProcess(
                    folder / part,
                    [part],
                    environ={"APPLIANCE_NATS_URL": server.url},
                    config=config,
                    python=(sys.executable, "-m", "cProfile", "-o", str(profile))
                    if part == found.profile
                    else (sys.executable,),
                )
            )
            for part in ("worker", "gateway")
        }
        gateway = running["gateway"]
        gateway.wait_ready()
        drive(gateway.base_url, clients=CASES[0].clients, inputs=found.profile_inputs, seconds=found.round_s, look=dict)
        running[found.profile].stop()
    pstats.Stats(str(profile)).sort_stats("tottime").print_stats(NOT_STARTUP, PROFILE_LINES)


if __name__ == "__main__":
    main()
