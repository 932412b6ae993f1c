"""What one job costs through the queue, in CPU time: submit, store, confirm, deliver, reply, ack.

    python -m tests.bench.queue_cpu [--jobs 20000] [--bytes 1024] [--outstanding 256]

Gateway, node and server are processes of their own, so that each one's CPU time can be read. Run it on a quiet machine:
times on a shared one vary by some ten percent.
"""

import argparse
import asyncio
import multiprocessing
import os
import tempfile
from collections.abc import Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TypeVar

import psutil
import uvloop

from appliance.errors import ApplianceError
from appliance.queue.base import Delivery, Pull
from appliance.queue.jetstream import JetStreamGatewayQueue, JetStreamNodeQueue
from appliance.settings import NatsSettings, QueueSettings
from tests.nats import NatsServer

SETTINGS = QueueSettings(ack_wait_s=60)
T = TypeVar("T")
ADDRESS_BYTES = len("replies.") + 32


class Loader:
    """A gateway that keeps a number of jobs outstanding."""

    def __init__(self, outstanding: int) -> None:
        self.room = asyncio.Semaphore(outstanding)
        self.answered = 0

    def on_replies(self, payload: bytes) -> None:
        """One message answers one job here."""
        self.answered += 1
        self.room.release()

    def on_refused(self, job_id: str, error: ApplianceError) -> None:
        """A benchmark that loses jobs measures nothing."""
        raise error

    def on_restored(self) -> None:
        """The connection must not break while measuring."""
        raise AssertionError("the connection broke")


async def load(url: str, *, jobs: int, size: int, outstanding: int) -> float:
    """Submit jobs, await their answers, and return the CPU seconds of this process."""
    loader = Loader(outstanding)
    async with JetStreamGatewayQueue(NatsSettings(url=url), SETTINGS, loader) as queue:
        payload = queue.reply_to.encode().ljust(size, b".")
        began_s = cpu_s(os.getpid())
        for number in range(jobs):
            await loader.room.acquire()
            name = f"job-{number}"
            await queue.submit(job_id=name, message_id=name, model="m", lane="interactive", payload=payload)
        while loader.answered < jobs:
            await loader.room.acquire()
        return cpu_s(os.getpid()) - began_s


def work(url: str, outstanding: int, parent: Connection) -> None:
    """Answer and settle every job until told to stop; send the CPU seconds spent between start and stop."""
    run(_work(url, outstanding, parent))


async def _work(url: str, outstanding: int, parent: Connection) -> None:
    arrived: asyncio.Queue[Delivery] = asyncio.Queue(outstanding * 2)
    async with (
        JetStreamNodeQueue(NatsSettings(url=url), SETTINGS) as queue,
        queue.pull(model="m", lane="interactive", on_delivery=arrived.put_nowait) as pull,
    ):
        await pull.want(outstanding)
        parent.send("ready")
        began_s = cpu_s(os.getpid())
        stop = asyncio.get_running_loop().run_in_executor(None, parent.recv)
        working = asyncio.create_task(_settle_all(arrived, pull, queue, outstanding))
        await stop
        working.cancel()
        await asyncio.wait([working])
        parent.send(cpu_s(os.getpid()) - began_s)


async def _settle_all(
    arrived: asyncio.Queue[Delivery], pull: Pull, queue: JetStreamNodeQueue, outstanding: int
) -> None:
    while True:
        delivery = await arrived.get()
        await queue.reply(delivery.payload[:ADDRESS_BYTES].decode(), delivery.payload)
        await delivery.ack()
        await pull.want(outstanding - arrived.qsize())


def run(work: Coroutine[object, object, T]) -> T:
    """On uvloop, as the appliance does."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def main() -> None:
    """Run once and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=20_000)
    parser.add_argument("--bytes", type=int, default=1024, dest="size")
    parser.add_argument("--outstanding", type=int, default=256)
    options = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    with tempfile.TemporaryDirectory() as folder, NatsServer(Path(folder)) as server:
        node = spawn.Process(target=work, args=(server.url, options.outstanding, theirs))
        node.start()
        ours.recv()
        server_began_s = cpu_s(server.pid)
        gateway_s = run(load(server.url, jobs=options.jobs, size=options.size, outstanding=options.outstanding))
        server_s = cpu_s(server.pid) - server_began_s
        ours.send("stop")
        node_s: float = ours.recv()
        node.join()
    print(f"{options.jobs} jobs of {options.size} B, {options.outstanding} outstanding; CPU microseconds per job")
    rows = {"gateway": gateway_s, "nats-server": server_s, "node": node_s, "all": gateway_s + server_s + node_s}
    for name, seconds in rows.items():
        print(f"{name:12} {seconds / options.jobs * 1e6:8.1f}")


if __name__ == "__main__":
    main()
