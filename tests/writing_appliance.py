"""A queue in memory, a writing node and a real engine process; jobs in, replies out, without a gateway."""

import asyncio
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from appliance.errors import ApplianceError
from appliance.jobs import Beat, Delta, Done, Event, Failed, Job, Reply, Task, decode_replies, encode_job
from appliance.presets import load_preset, shipped_presets_dir
from appliance.queue.base import GatewayQueue
from appliance.queue.memory import MemoryBroker
from appliance.settings import ModelSettings, QueueSettings, WorkerSettings
from appliance.workers.engine_process import host_command
from appliance.workers.writing.engine import TextEngineProcess
from appliance.workers.writing.node import WritingNode, WritingPlace, WrittenModel
from appliance.workers.writing.writer import Writer

DEADLINE_S = 60.0
STOP_S = 30.0


def written(
    name: str, folder: Path, *, generation: dict[str, Any] | None = None, dtype: str = "bfloat16"
) -> WrittenModel:
    """A model that writes, with the default tuning of any CPU."""
    tuning: dict[str, Any] = {"dtype": dtype}
    if generation is not None:
        tuning["generation"] = {"runtime": "embedded", "sequences_max": 8, "sequence_tokens_max": 1024} | generation
    settings = ModelSettings(name=name, folder=str(folder), facts={"tasks": ["generate"]}, tuning=tuning)
    preset = load_preset(settings, hardware="cpu", presets_dirs=[shipped_presets_dir()])
    assert preset.tuning.generation is not None
    writer = Writer.load(folder, preset.facts, tokens_max=preset.tuning.generation.sequence_tokens_max)
    return WrittenModel(preset, folder, writer)


class Asker:
    """A gateway that only listens."""

    def __init__(self) -> None:
        self.queue: GatewayQueue | None = None
        self.engine: TextEngineProcess | None = None
        self._replies: dict[str, asyncio.Queue[Reply]] = {}
        self._numbers = itertools.count()

    def on_replies(self, payload: bytes) -> None:
        """See `GatewayListener`."""
        for reply in decode_replies(payload):
            if (waiting := self._replies.get(reply.job_id)) is not None:
                waiting.put_nowait(reply)

    def on_refused(self, job_id: str, error: ApplianceError) -> None:
        """See `GatewayListener`."""
        raise AssertionError(error)

    def on_restored(self) -> None:
        """See `GatewayListener`."""

    async def send(self, model: str, task: Task, *, deadline_s: float = DEADLINE_S) -> str:
        """Submit a job; its id."""
        assert self.queue is not None
        job_id = f"job-{next(self._numbers)}"
        self._replies[job_id] = asyncio.Queue()
        job = Job(job_id, model, task, self.queue.reply_to, deadline_s=time.time() + deadline_s)
        await self.queue.submit(
            job_id=job_id, message_id=job_id, model=model, lane="interactive", payload=encode_job(job)
        )
        return job_id

    async def events(self, job_id: str) -> AsyncIterator[Event]:
        """What comes of a job, to its end; in order and without a hole."""
        attempt = seq = 0
        while True:
            reply = await asyncio.wait_for(self._replies[job_id].get(), DEADLINE_S)
            if reply.attempt > attempt:
                attempt, seq = reply.attempt, 0
            assert (reply.attempt, reply.seq) == (attempt, seq)
            seq += 1
            yield reply.event
            if isinstance(reply.event, Done | Failed):
                return

    def unheard(self, job_id: str) -> int:
        """Replies that came and that nobody has looked at."""
        return self._replies[job_id].qsize()

    def kill_engine(self) -> None:
        """As the kernel kills what takes too much memory."""
        assert self.engine is not None
        os.kill(self.engine.pid, signal.SIGKILL)

    async def cancel(self, job_id: str) -> None:
        """Nobody waits any more."""
        assert self.queue is not None
        await self.queue.cancel([job_id])

    async def ask(self, model: str, task: Task) -> tuple[list[Event], Done]:
        """A whole answer; raises what the job failed with."""
        job_id = await self.send(model, task)
        events = [event async for event in self.events(job_id)]
        last = events.pop()
        if isinstance(last, Failed):
            raise last.error()
        assert isinstance(last, Done)
        return [event for event in events if not isinstance(event, Beat)], last

    async def text(self, model: str, task: Task) -> tuple[str, Done]:
        """The text of an answer."""
        parts, done = await self.ask(model, task)
        return "".join(part.text for part in parts if isinstance(part, Delta)), done


@asynccontextmanager
async def asking(broker: MemoryBroker) -> AsyncIterator[Asker]:
    """Somebody who asks, whoever answers."""
    asker = Asker()
    async with broker.gateway_queue(asker) as queue:
        asker.queue = queue
        yield asker


@asynccontextmanager
async def writing_node(
    asker: Asker, broker: MemoryBroker, model: WrittenModel, *, sockets_dir: Path, engine: str = "generator"
) -> AsyncIterator[None]:
    """A node with one engine process on the CPU, from its start to its end."""
    stop = asyncio.Event()

    def start() -> TextEngineProcess:
        asker.engine = TextEngineProcess(
            host_command(engine, threads=1),
            name="writer",
            sockets_dir=sockets_dir,
            start_timeout_s=DEADLINE_S,
            batch_timeout_s=DEADLINE_S,
        )
        return asker.engine

    async with broker.node_queue() as queue:
        node = WritingNode(
            queue,
            model=model,
            place=WritingPlace("cpu", "cpu", 1, start),
            worker=WorkerSettings(calibration_s=0, drain_s=0.5),
            settings=broker.settings,
        )
        serving = asyncio.create_task(node.run(stop))
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait_for(serving, STOP_S)


@asynccontextmanager
async def writing_appliance(
    model: WrittenModel, *, sockets_dir: Path, engine: str = "generator"
) -> AsyncIterator[Asker]:
    """One node, and somebody who asks."""
    broker = MemoryBroker(QueueSettings())
    async with asking(broker) as asker, writing_node(asker, broker, model, sockets_dir=sockets_dir, engine=engine):
        yield asker
