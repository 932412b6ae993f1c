"""The node: pulls the jobs of the models it holds, tokenizes, batches, runs them on its devices, replies, settles.

    queue ─ deliveries ─▶ Intake (decode, tokenize) ─ items ─▶ Batcher ─▶ Device(s) ─ rows ─▶ Ledger (reply, then ack)

Everything here runs on one event loop and no engine code runs in it, so the queue is heard and jobs are extended
however busy the devices are. Several devices take from the same batchers: whichever is free takes the next batch.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec

from appliance.errors import StartupError
from appliance.jobs import Lane, decode_cancel
from appliance.presets import Preset
from appliance.queue.base import NodeQueue, Pull
from appliance.settings import QueueSettings, WorkerSettings
from appliance.workers.backlog import Backlog
from appliance.workers.batcher import Batcher, Budget
from appliance.workers.device import Device, EngineFactory
from appliance.workers.intake import Intake, Reader
from appliance.workers.ledger import Ledger
from appliance.workers.open_job import Item, OpenJob
from appliance.workers.tokenize import Tokenizer, Tokens
from appliance.workers.wire import Load, Loaded

LANES: tuple[Lane, ...] = ("interactive", "bulk")
EXTENSIONS_PER_ACK_WAIT = 3

_log = logging.getLogger(__name__)


class ServedModel(msgspec.Struct, frozen=True):
    """A model this node holds: its preset and its verified files."""

    preset: Preset
    folder: Path
    tokenizer: Tokenizer

    @property
    def name(self) -> str:
        """As jobs carry it."""
        return self.preset.facts.name

    @property
    def batch_tokens_max(self) -> int:
        """Token budget of one batch."""
        return self.preset.tuning.batch_tokens_max


class Node:
    """Serves its models until told to stop."""

    def __init__(
        self,
        queue: NodeQueue,
        *,
        models: Sequence[ServedModel],
        engine_factories: Mapping[str, EngineFactory],
        threads: int,
        worker: WorkerSettings,
        settings: QueueSettings,
    ) -> None:
        """`engine_factories` make an engine process per device, by torch's name of it; `threads` is for CPU devices."""
        self._queue = queue
        self._models = {model.name: model for model in models}
        self._threads = threads
        self._worker = worker
        self._settings = settings
        self._ledger = Ledger(queue, on_work_done=self._on_work_done)
        self._batchers: dict[str, Batcher[Item]] = {
            model.name: Batcher(_budget(model, bulk_share=worker.bulk_share)) for model in models
        }
        self._backlogs = {
            model.name: Backlog(
                tokens_max=model.preset.tuning.backlog_batches * model.batch_tokens_max * len(engine_factories)
            )
            for model in models
        }
        self._devices = [self._device(name, factory) for name, factory in engine_factories.items()]
        self._work_changed = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then finish what is open for at most `drain_s` and give the rest back.

        Raises StartupError (in an ExceptionGroup) when a model or an engine cannot be brought up.
        """
        with ThreadPoolExecutor(self._worker.tokenizer_threads, "tokenize") as pool:
            async with asyncio.TaskGroup() as group:
                devices = [group.create_task(device.run()) for device in self._devices]
                cards = await self._loaded(stop)
                if cards is None:
                    for task in devices:
                        task.cancel()
                    return
                intake = Intake(
                    self._ledger,
                    readers={name: self._reader(name, cards[name]) for name in self._models},
                    deliveries_max=self._settings.deliveries_max,
                    on_read=self._on_read,
                )
                self._queue.on_cancel(self._on_cancel)
                readers = [group.create_task(intake.run(pool)) for _ in range(self._worker.tokenizer_threads)]
                others = [group.create_task(self._extend()), group.create_task(self._wake_at(stop))]
                await self._pull(intake, stop)
                await self._drain()
                for task in [*readers, *others, *devices]:
                    task.cancel()
            await intake.give_back()
            await self._ledger.give_back()

    async def _loaded(self, stop: asyncio.Event) -> dict[str, Loaded] | None:
        """What the engines declare of the models, once every device holds them all; None when `stop` comes first."""
        loading = asyncio.create_task(self._cards())
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loading.cancel()
            stopping.cancel()
            await asyncio.wait({loading, stopping})
        if loading.cancelled():
            return None
        cards = loading.result()
        by_model = {card.model: card for card in cards}
        widths = {(card.model, card.width) for card in cards}
        if len(widths) != len(by_model):
            raise StartupError(f"the devices declare different widths for one model: {sorted(widths)}")
        return by_model

    async def _cards(self) -> list[Loaded]:
        # Shielded: the devices go on loading whoever stops waiting for them.
        return [card for device in self._devices for card in await asyncio.shield(device.loaded)]

    async def _pull(self, intake: Intake, stop: asyncio.Event) -> None:
        """Keep the queue told of how much this node wants, until `stop`."""
        async with AsyncExitStack() as stack:
            pulls: dict[tuple[str, Lane], Pull] = {}
            for model in self._models:
                for lane in LANES:
                    deliver = partial(intake.deliver, model)
                    opened = self._queue.pull(model=model, lane=lane, on_delivery=deliver)
                    pulls[model, lane] = await stack.enter_async_context(opened)
            _log.info("serving %s", ", ".join(self._models))
            while not stop.is_set():
                self._work_changed.clear()
                for (model, lane), pull in pulls.items():
                    await pull.want(self._wish(model, lane, intake))
                await self._work_changed.wait()
            for pull in pulls.values():
                await pull.want(0)

    async def _wake_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._work_changed.set()

    def _wish(self, model: str, lane: Lane, intake: Intake) -> int:
        wish = self._backlogs[model].wish(unopened_jobs=intake.unread(model))
        if lane == "bulk" and wish:
            return max(1, round(wish * self._worker.bulk_share))
        return wish

    async def _drain(self) -> None:
        """Wait until everything open is settled, for at most `drain_s`."""
        try:
            async with asyncio.timeout(self._worker.drain_s):
                while len(self._ledger):
                    self._work_changed.clear()
                    await self._work_changed.wait()
        except TimeoutError:
            _log.warning("%d jobs are given back unfinished", len(self._ledger))

    async def _extend(self) -> None:
        interval_s = self._settings.ack_wait_s / EXTENSIONS_PER_ACK_WAIT
        while True:
            await asyncio.sleep(interval_s)
            await self._ledger.extend(age_s=interval_s)

    def _on_read(self, job: OpenJob, inputs: Sequence[Tokens]) -> None:
        model = job.job.model
        for item in job.begin(inputs):
            self._batchers[model].add(item)
        self._backlogs[model].opened(job.tokens)
        self._work_changed.set()
        for device in self._devices:
            device.wake()

    def _on_work_done(self, model: str, tokens: int) -> None:
        self._backlogs[model].closed(tokens)
        self._work_changed.set()

    def _on_cancel(self, payload: bytes) -> None:
        try:
            self._ledger.cancelled.add(decode_cancel(payload).job_ids)
        except msgspec.DecodeError as error:
            _log.warning("a cancellation cannot be read: %s", error)

    def _reader(self, name: str, card: Loaded) -> Reader:
        model = self._models[name]
        return Reader(model.tokenizer, model.preset.facts.prompts, card.width)

    def _device(self, name: str, factory: EngineFactory) -> Device:
        return Device(
            name,
            engine_factory=factory,
            orders=[self._order(model, device=name) for model in self._models.values()],
            batchers=self._batchers,
            batches_ahead={model.name: model.preset.tuning.batches_ahead for model in self._models.values()},
            sink=self._ledger,
        )

    def _order(self, model: ServedModel, *, device: str) -> Load:
        return Load(
            model=model.name,
            folder=str(model.folder),
            dtype=model.preset.tuning.dtype,
            device=device,
            threads=self._threads,
        )


def _budget(model: ServedModel, *, bulk_share: float) -> Budget:
    tuning = model.preset.tuning
    return Budget(
        tokens_max=tuning.batch_tokens_max,
        items_max=tuning.batch_items_max,
        max_wait_s=tuning.max_wait_ms / 1000,
        bulk_share=bulk_share,
    )
