"""The appliance against infinity-emb (torch engine): the same model files, the same clients, in turn.

    python -m tests.bench.against_infinity [--venv FOLDER] [--rounds 5] [--round-s 8] [--quick] [--json FILE]

infinity gets an environment of its own, made on the first run (about 3 GB). It is measured in bfloat16, with and
without BetterTransformer, of which the better counts, and with its defaults (float32, BetterTransformer). Servers are
idle in the rounds of the others. Ratios are texts a second by the clock and by the CPU time of the servers.
"""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from tests.appliance_process import STOP_S, free_port, status_of
from tests.bench.harness import (
    MODEL,
    Driven,
    Rounds,
    Row,
    drive,
    options,
    parsed,
    parts,
    real_appliance,
    report,
    tree_times,
)
from tests.fake_model import packaged_minilm

VENV = Path(".appliance/bench/infinity")
# What works together: the newest infinity, the torch that we use, and of the rest the newest that it runs with. Its
# command line breaks with click 8.2, and BetterTransformer, its default, needs transformers below 4.49.
REQUIREMENTS = (
    "infinity-emb[torch,server]==0.0.77",
    "torch==2.13.0",
    "optimum==1.24.0",
    "transformers==4.48.3",
    "click==8.1.8",
)
START_S = 120.0
LOADS = {"64 x 1 text": (64, 1, 3.5), "4 x 64 texts": (4, 64, 2.8)}
DEFAULTS_TARGET = 6.0
BEST = {
    "bf16": ("--dtype", "bfloat16"),
    "bf16, no BetterTransformer": ("--dtype", "bfloat16", "--no-bettertransformer"),
}
DEFAULTS = {"defaults": ()}


def main() -> None:
    parser = options(__doc__, rounds=5, round_s=8.0)
    parser.add_argument("--venv", type=Path, default=VENV, help="infinity's environment; made where it is not there")
    found = parsed(parser)
    program = installed(found.venv)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers: dict[str, tuple[str, Callable[[], dict[str, float]]]] = {}
        for name, arguments in (BEST | DEFAULTS).items():
            base_url, pid = stack.enter_context(infinity(program, arguments, log=folder / f"{len(servers)}.log"))
            servers[name] = (base_url, partial(tree_times, pid))
        appliance = stack.enter_context(real_appliance(folder / "appliance"))
        appliance.wait_ready()
        servers["ours"] = (appliance.base_url, partial(parts, appliance))
        contenders = {
            f"{name}, {load}": partial(
                drive, base_url, clients=clients, inputs=inputs, seconds=found.round_s, look=look
            )
            for load, (clients, inputs, _) in LOADS.items()
            for name, (base_url, look) in servers.items()
        }
        rounds = Rounds(contenders, found.rounds)
    report("against_infinity", [row for load in LOADS for row in _rows(rounds, load)], found)


def _rows(rounds: Rounds[Driven], load: str) -> list[Row]:
    rows = [
        Row(f"{load}: {name}", rounds.median(f"{name}, {load}", _texts_per_s), "texts/s")
        for name in ("ours", *BEST, *DEFAULTS)
    ]
    for title, figure in (("by the clock", _texts_per_s), ("by CPU time", _texts_per_cpu_s)):
        best = max(BEST, key=lambda name: rounds.median(f"{name}, {load}", figure))
        for name, target in ((best, LOADS[load][2]), ("defaults", DEFAULTS_TARGET)):
            ratio, spread = rounds.ratio(f"ours, {load}", f"{name}, {load}", figure)
            rows.append(Row(f"{load}: ours / {name}, {title}", ratio, "x", target, spread=spread))
    return rows


def _texts_per_s(round_: Driven) -> float:
    return round_.texts_per_s


def _texts_per_cpu_s(round_: Driven) -> float:
    return round_.texts_per_cpu_s


def installed(venv: Path) -> Path:
    """The program in its own environment, which is made if it is not there."""
    program = venv / "bin" / "infinity_emb"
    if not program.exists():
        print(f"installing infinity into {venv} (minutes)", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
        subprocess.run([*pip, *REQUIREMENTS], check=True)
    return program.absolute()


@contextlib.contextmanager
def infinity(program: Path, arguments: tuple[str, ...], *, log: Path) -> Iterator[tuple[str, int]]:
    """A server that is ready: its base URL and process."""
    port = free_port()
    command = [
        *(str(program), "v2", "--model-id", str(packaged_minilm()), "--served-model-name", MODEL, "--engine", "torch"),
        *("--device", "cpu", "--host", "127.0.0.1", "--port", str(port), *arguments),
    ]
    environ = {
        "HF_HUB_OFFLINE": "1",
        "DO_NOT_TRACK": "1",
        "INFINITY_ANONYMOUS_USAGE_STATS": "0",
        "HOME": str(log.parent),
    }
    with log.open("wb") as output, subprocess.Popen(command, env=environ, stdout=output, stderr=output) as process:
        try:
            deadline_s = time.monotonic() + START_S
            while status_of(f"http://127.0.0.1:{port}/health") != 200:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"infinity did not start:\n{log.read_text()[-2000:]}")
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            process.kill()


if __name__ == "__main__":
    main()
