"""A dispatcher, a queue in memory, a node and a real engine process: tasks from end to end, without HTTP."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from appliance.gateway.dispatch import Dispatcher
from appliance.gateway.pending_calls import Result
from appliance.jobs import Job, Task
from appliance.presets import load_preset, shipped_presets_dir
from appliance.queue.memory import MemoryBroker
from appliance.settings import ModelSettings, QueueSettings, WorkerSettings
from appliance.workers.device import Place
from appliance.workers.engine_process import EngineProcess, host_command
from appliance.workers.node import Node, ServedModel
from appliance.workers.tokenize import Tokenizer
from appliance.workers.vector_space import VectorSpace

DEADLINE_S = 60.0
STOP_S = 30.0


def served(name: str, folder: Path, **facts: Any) -> ServedModel:  # of any type that a preset may have
    """A model in float32, with the default tuning of any CPU."""
    settings = ModelSettings(name=name, folder=str(folder), facts=facts, tuning={"dtype": "float32"})
    preset = load_preset(settings, hardware="cpu", presets_dirs=[shipped_presets_dir()])
    tokenizer = Tokenizer.load(folder, preset.facts.tokens_max)
    return ServedModel(preset, folder, tokenizer, VectorSpace.of(preset.facts, folder, is_own_folder=True))


class Asker:
    """Sends tasks to the node."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    async def ask(self, model: str, task: Task, *, first_index: int = 0) -> Result:
        """The answer of one job; raises what it failed with."""
        job = Job(
            id=f"job-{time.monotonic_ns()}",
            model=model,
            task=task,
            reply_to=self._dispatcher.reply_to,
            deadline_s=time.time() + DEADLINE_S,
            first_index=first_index,
        )
        (result,) = await self._dispatcher.run([job])
        return result


@asynccontextmanager
async def node_appliance(models: Sequence[ServedModel], *, sockets_dir: Path) -> AsyncIterator[Asker]:
    """One engine process on the CPU that holds the models, from its start to its end."""

    def engine() -> EngineProcess:
        return EngineProcess(
            host_command("encoder", threads=1),
            name="tiny",
            sockets_dir=sockets_dir,
            start_timeout_s=DEADLINE_S,
            batch_timeout_s=DEADLINE_S,
        )

    broker = MemoryBroker(QueueSettings())
    dispatcher = Dispatcher(pending_requests_max=10, pending_bytes_max=10_000_000)
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        dispatcher.attach(await stack.enter_async_context(broker.gateway_queue(dispatcher)))
        node = Node(
            await stack.enter_async_context(broker.node_queue()),
            models=models,
            places=[Place("cpu/0", "cpu", 1, engine)],
            worker=WorkerSettings(calibration_s=0),
            settings=broker.settings,
        )
        serving = asyncio.create_task(node.run(stop))
        try:
            yield Asker(dispatcher)
        finally:
            stop.set()
            await asyncio.wait_for(serving, STOP_S)
