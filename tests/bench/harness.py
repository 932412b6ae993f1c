"""What the benchmarks share: starting an appliance, loading it, CPU time by part, rounds in turn, and the verdict."""

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import numpy as np
import orjson
import psutil
import uvloop

from appliance.bench.answers import judge
from appliance.bench.http import Address, Connections
from appliance.bench.machine import Machine, this_machine
from appliance.bench.report import number, table
from appliance.bench.schedule import text_of
from appliance.bench.server_cpu import family
from tests.appliance_process import ApplianceProcess
from tests.fake_model import fake_config

MODEL = "text-embedding-3-small"
LENGTHS = (8, 256)  # tokens
BLOCK = 64
BODIES = 256  # distinct requests of a round; then they come again
JUDGED_EVERY = 16  # answers are checked one in so many: the client's CPU comes off the same cores

T = TypeVar("T")


class Row(msgspec.Struct, frozen=True):
    """A figure, and what it should be: at least, or at most. Without a target it is for information."""

    what: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None
    spread: tuple[float, float] | None = None  # smallest and largest of the rounds

    @property
    def verdict(self) -> str:
        """Empty without a target."""
        if self.at_least is not None:
            return "pass" if self.value >= self.at_least else "FAIL"
        if self.at_most is not None:
            return "pass" if self.value <= self.at_most else "FAIL"
        return ""


class Findings(msgspec.Struct, frozen=True):
    """What a script writes with `--json`."""

    script: str
    machine: Machine
    options: dict[str, str]
    rows: list[Row]


class Driven(msgspec.Struct, frozen=True):
    """What closed-loop clients got done in a window, and the CPU seconds of what was watched, by name."""

    texts: float
    wall_s: float
    cpu_s: dict[str, float]
    client_cpu_s: float

    @property
    def texts_per_s(self) -> float:
        """By the clock."""
        return self.texts / self.wall_s

    @property
    def texts_per_cpu_s(self) -> float:
        """By the CPU time of everything watched."""
        return self.texts / sum(self.cpu_s.values())


class Rounds(Generic[T]):
    """The rounds of several contenders, run in turn."""

    def __init__(self, contenders: Mapping[str, Callable[[], T]], count: int) -> None:
        self.of: dict[str, list[T]] = {name: [] for name in contenders}
        for _ in range(count):
            for name, contender in contenders.items():
                self.of[name].append(contender())

    def ratio(self, upper: str, lower: str, figure: Callable[[T], float]) -> tuple[float, tuple[float, float]]:
        """Median, and smallest and largest, of the ratios taken within each round."""
        ratios = [figure(a) / figure(b) for a, b in zip(self.of[upper], self.of[lower], strict=True)]
        return statistics.median(ratios), (min(ratios), max(ratios))

    def median(self, name: str, figure: Callable[[T], float]) -> float:
        """Over the rounds."""
        return statistics.median(figure(each) for each in self.of[name])


def options(description: str | None, *, rounds: int, round_s: float) -> argparse.ArgumentParser:
    """The options that all scripts have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one or two short rounds: to see that it works")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--round-s", type=float, default=round_s, help="seconds of one round")
    parser.add_argument("--json", type=Path, help="write the findings here")
    return parser


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The options, shortened where `--quick` asks for it."""
    found = parser.parse_args()
    if found.quick:
        found.rounds, found.round_s = min(found.rounds, 2), min(found.round_s, 2.0)
    return found


def report(script: str, rows: Sequence[Row], found: argparse.Namespace) -> None:
    """Print the table, the verdicts and the machine; write JSON where asked."""
    machine = this_machine()
    cells = [
        (
            row.what,
            number(row.value),
            row.unit,
            f"{number(row.spread[0])}..{number(row.spread[1])}" if row.spread else "",
            f">= {row.at_least:g}" if row.at_least is not None else f"<= {row.at_most:g}" if row.at_most else "",
            row.verdict,
        )
        for row in rows
    ]
    print(table((script, "median", "unit", "min..max", "target", ""), cells))
    print(f"\n{machine.line()}")
    if found.quick:
        print("quick: too short to quote")
    if found.json:
        findings = Findings(script, machine, {key: str(value) for key, value in vars(found).items()}, list(rows))
        found.json.write_bytes(msgspec.json.format(msgspec.json.encode(findings)) + b"\n")


def fake_appliance(folder: Path) -> ApplianceProcess:
    """An appliance whose engine computes nothing. To be entered, and awaited with `wait_ready`."""
    return ApplianceProcess(folder, config=fake_config(folder / "model", alias=MODEL))


def real_appliance(folder: Path) -> ApplianceProcess:
    """An appliance as a user gets it, with the default model."""
    return ApplianceProcess(folder)


def parts(appliance: ApplianceProcess) -> dict[str, float]:
    """CPU seconds so far: of the gateways, NATS, the worker, the engines, the supervisor."""
    return part_times(appliance.family())


def part_times(processes: Sequence[psutil.Process]) -> dict[str, float]:
    """CPU seconds so far, by the part that a process is."""
    found: dict[str, float] = {}
    for process in processes:
        try:
            line, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.Error:
            continue
        name = next((name for name, word in _PARTS if word in line), "other")
        found[name] = found.get(name, 0.0) + times.user + times.system
    return found


def tree_times(pid: int) -> dict[str, float]:
    """CPU seconds so far of a process and all below it."""
    return {"server": sum(part_times(family(psutil.Process(pid))).values())}


def drive(
    base_url: str,
    *,
    clients: int,
    inputs: int,
    seconds: float,
    look: Callable[[], dict[str, float]],
    tokens: int | None = None,
) -> Driven:
    """`clients` that each send their next request when the last is answered, for `seconds` after a warm-up.

    A request counts by the share of its time that lies in the window, so that long requests do not make a short round
    jump. `look` tells CPU seconds by name; what was spent between the window's ends is reported. Texts have `tokens`
    tokens, or the usual mix of lengths. Raises RuntimeError for an answer that is not right: that measures nothing.
    """
    return uvloop.run(_drive(base_url, clients=clients, inputs=inputs, seconds=seconds, look=look, tokens=tokens))


async def _drive(
    base_url: str,
    *,
    clients: int,
    inputs: int,
    seconds: float,
    look: Callable[[], dict[str, float]],
    tokens: int | None,
) -> Driven:
    finished: list[tuple[float, float]] = []  # sent, answered
    async with Connections(Address.of(base_url)) as connections:
        requests = itertools.cycle(prepared(connections, inputs=inputs, tokens=tokens))
        until_s = time.perf_counter() + seconds / 4 + seconds

        async def client(numbers: Iterator[int]) -> None:
            while (sent_s := time.perf_counter()) < until_s:
                answer = await connections.send(next(requests))
                now_s = time.perf_counter()
                if answer.status != 200 or next(numbers) % JUDGED_EVERY == 0:
                    verdict = judge(answer.status, answer.body, inputs=inputs)
                    if verdict.kind != "right":
                        raise RuntimeError(f"{base_url}: {verdict.reason}")
                finished.append((sent_s, now_s))

        numbers = itertools.count()
        async with asyncio.TaskGroup() as group:
            for _ in range(clients):
                group.create_task(client(numbers))
            await asyncio.sleep(seconds / 4)
            began_s, ours_s, before = time.perf_counter(), time.process_time(), look()
            await asyncio.sleep(seconds)
            ended_s, ours_end_s, after = time.perf_counter(), time.process_time(), look()
    shares = (max(0.0, min(now_s, ended_s) - max(sent_s, began_s)) / (now_s - sent_s) for sent_s, now_s in finished)
    return Driven(
        texts=inputs * sum(shares),
        wall_s=ended_s - began_s,
        cpu_s={name: after[name] - before.get(name, 0.0) for name in after},
        client_cpu_s=ours_end_s - ours_s,
    )


def prepared(connections: Connections, *, inputs: int, tokens: int | None) -> list[bytes]:
    """Requests to send; the same every time."""
    texts = sample_texts(BODIES * inputs, tokens=tokens)
    bodies = (
        {"model": MODEL, "input": texts[at : at + inputs] if inputs > 1 else texts[at], "encoding_format": "base64"}
        for at in range(0, len(texts), inputs)
    )
    return [connections.post("/embeddings", orjson.dumps(body), key=None) for body in bodies]


def sample_texts(count: int, *, tokens: int | None = None) -> list[str]:
    """Texts of `tokens` tokens, or of 8 to 256: evenly spread in every 64 of them, so that samples weigh the same."""
    random = np.random.default_rng(1)
    lengths: list[int] = []
    while len(lengths) < count:
        block = np.rint(np.linspace(*LENGTHS, BLOCK)).astype(int)
        lengths += [tokens] * BLOCK if tokens else random.permutation(block).tolist()
    return [text_of(length, random) for length in lengths[:count]]


_PARTS = (
    ("nats", "nats-server"),
    ("engine", "appliance.workers.host"),
    ("gateway", "appliance gateway"),
    ("worker", "appliance worker"),
    ("supervisor", "appliance up"),
)
