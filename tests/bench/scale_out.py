"""From one worker to eight: goodput of eight ÷ eight times that of one.

    python -m tests.bench.scale_out [--workers 8] [--rounds 5] [--round-s 6] [--quick] [--json FILE]

The engines are simulated: they take time by tokens without computing, so that this machine's cores are not the bound
and what is seen is queue, gateway and nodes. One gateway and one NATS server each for the one and for the eight.
"""

import contextlib
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from appliance.workers.engines.fake import FakeModel
from tests.appliance_process import ApplianceProcess
from tests.bench.harness import MODEL, Rounds, Row, drive, options, parsed, part_times, report
from tests.fake_model import fake_config
from tests.nats import NatsServer

CLIENTS_A_WORKER = 32
INPUTS = 1
ENGINE = FakeModel(batch_s=0.002, token_s=0.0002)


def main() -> None:
    parser = options(__doc__, rounds=5, round_s=6.0)
    parser.add_argument("--workers", type=int, default=8)
    found = parsed(parser)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        contenders = {
            str(count): partial(
                drive,
                gateway.base_url,
                clients=CLIENTS_A_WORKER * count,
                inputs=INPUTS,
                seconds=found.round_s,
                look=lambda gateway=gateway: part_times(gateway.family()),  # type: ignore[misc]
            )
            for count in (1, found.workers)
            for gateway in [stack.enter_context(cluster(folder / str(count), workers=count))]
        }
        rounds = Rounds(contenders, found.rounds)
    many = str(found.workers)
    ratio, spread = rounds.ratio(many, "1", lambda round_: round_.texts_per_s)
    rows = [
        Row("1 worker", rounds.median("1", lambda round_: round_.texts_per_s), "texts/s"),
        Row(f"{many} workers", rounds.median(many, lambda round_: round_.texts_per_s), "texts/s"),
        Row(
            f"{many} workers / {many} times 1",
            ratio / found.workers,
            "x",
            at_least=0.95,
            spread=(spread[0] / found.workers, spread[1] / found.workers),
        ),
        Row(
            "gateway, of one core", rounds.median(many, lambda round_: round_.cpu_s["gateway"] / round_.wall_s), "cores"
        ),
        Row("client, of one core", rounds.median(many, lambda round_: round_.client_cpu_s / round_.wall_s), "cores"),
    ]
    report("scale_out", rows, found)


@contextlib.contextmanager
def cluster(folder: Path, *, workers: int) -> Iterator[ApplianceProcess]:
    """The gateway of a NATS server, so many workers of one engine each, and itself. It is ready."""
    nats_folder = folder / "nats"
    nats_folder.mkdir(parents=True)
    config = fake_config(folder / "model", ENGINE, alias=MODEL)
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(NatsServer(nats_folder))
        environ = {"APPLIANCE_NATS_URL": server.url, "APPLIANCE_WORKER_ENGINES": "1"}

        def part(name: str, command: str) -> ApplianceProcess:
            return stack.enter_context(ApplianceProcess(folder / name, [command], environ=environ, config=config))

        nodes = [part(f"worker-{number}", "worker") for number in range(workers)]
        gateway = part("gateway", "gateway")
        for node in nodes:
            node.wait_for_line("serving")
        gateway.wait_ready()
        yield gateway


if __name__ == "__main__":
    main()
