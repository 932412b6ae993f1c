"""The node: pulls the jobs of the models it holds, tokenizes, batches, runs them on its devices, replies, settles.

    queue ─ deliveries ─▶ Intake (decode, tokenize) ─ items ─▶ Batcher ─▶ Device(s) ─ rows ─▶ Ledger (reply, then ack)

Everything here runs on one event loop and no engine code runs in it, so the queue is heard and jobs are extended
however busy the devices are. Several devices take from the same batchers: whichever is free takes the next batch.
"""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

import msgspec

from appliance import telemetry
from appliance.errors import StartupError
from appliance.jobs import Lane, decode_cancel
from appliance.presets import Preset
from appliance.queue.base import NodeQueue, Pull
from appliance.settings import QueueSettings, WorkerSettings
from appliance.workers import calibration
from appliance.workers.backlog import Backlog
from appliance.workers.batcher import Batcher, Budget
from appliance.workers.cost import UNKNOWN, CostModel, calibration_batches
from appliance.workers.device import Device, Place, Served
from appliance.workers.exchange import Exchange
from appliance.workers.intake import Intake
from appliance.workers.ledger import Ledger
from appliance.workers.open_job import Item, OpenJob
from appliance.workers.parse_reading import ParseReader
from appliance.workers.raw_texts import RawTexts
from appliance.workers.read_job import JobReader, Reading
from appliance.workers.reading import Reader, engine_task
from appliance.workers.tokenize import Tokenizer
from appliance.workers.vector_space import VectorSpace
from appliance.workers.wire import Load, Loaded

LANES: tuple[Lane, ...] = ("interactive", "bulk")
EXTENSIONS_PER_ACK_WAIT = 3

_log = logging.getLogger(__name__)


class ServedModel(msgspec.Struct, frozen=True):
    """A model this node holds: its preset, its verified files, and what they say."""

    preset: Preset
    folder: Path
    tokenizer: Tokenizer | RawTexts
    space: VectorSpace
    cache: str = ""  # where engines may keep what they can compute again; "": nowhere

    @property
    def name(self) -> str:
        """As jobs carry it."""
        return self.preset.facts.name


class Node:
    """Serves its models until told to stop."""

    def __init__(
        self,
        queue: NodeQueue,
        *,
        models: Sequence[ServedModel],
        places: Sequence[Place],
        worker: WorkerSettings,
        settings: QueueSettings,
    ) -> None:
        """Every place holds every model."""
        self._queue = queue
        self._models = {model.name: model for model in models}
        self._worker = worker
        self._settings = settings
        self._ledger = Ledger(queue, on_work_done=self._on_work_done)
        self._costs = {model.name: CostModel(model.preset.tuning.cost or UNKNOWN) for model in models}
        self._batchers: dict[str, Batcher[Item]] = {
            model.name: Batcher(_budget(model, bulk_share=worker.bulk_share)) for model in models
        }
        self._backlogs = {
            model.name: Backlog(limit_ms=partial(_backlog_ms, model, self._costs[model.name], len(places)))
            for model in models
        }
        exchange = Exchange()
        self._devices = [
            Device(place, models=self._served(place), exchange=exchange, sink=self._ledger) for place in places
        ]
        for device in self._devices:
            device.meet(self._devices)
        self._pulls: dict[tuple[str, Lane], Pull] = {}
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
                await self._calibrate()
                intake = Intake(
                    self._ledger,
                    readers={name: self._reader(name, cards[name]) for name in self._models},
                    deliveries_max=self._settings.deliveries_max,
                    on_read=self._on_read,
                    on_round=self._work_changed.set,
                )
                self._queue.on_cancel(self._on_cancel)
                readers = [group.create_task(intake.run(pool)) for _ in range(self._worker.tokenizer_threads)]
                others = [group.create_task(self._extend()), group.create_task(self._wake_at(stop))]
                await self._pull(intake, stop)
                await self._drain()
                for task in [*readers, *others, *devices]:
                    task.cancel()
            await intake.give_back()
            await self._ledger.give_back_all()

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
            for model in self._models:
                for lane in LANES:
                    deliver = partial(intake.deliver, model)
                    opened = self._queue.pull(model=model, lane=lane, on_delivery=deliver)
                    self._pulls[model, lane] = await stack.enter_async_context(opened)
            _log.info("serving %s", ", ".join(self._models))
            while not stop.is_set():
                self._work_changed.clear()
                for (model, lane), pull in self._pulls.items():
                    if self._backlogs[model].is_overfull:
                        await pull.recall()
                    else:
                        await pull.want(self._wish(model, lane, intake))
                await self._work_changed.wait()
            for pull in self._pulls.values():
                await pull.want(0)

    async def _wake_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._work_changed.set()

    def _wish(self, model: str, lane: Lane, intake: Intake) -> int:
        wish = self._backlogs[model].wish(unread_jobs=intake.unread(model))
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

    def _on_read(self, job: OpenJob, reading: Reading) -> bool:
        """Take the job's items on; False when this node has far more than it can start soon.

        Only a first delivery is refused: however often nodes misjudge, a job moves on once at most.
        """
        model = job.job.model
        backlog = self._backlogs[model]
        is_refused = backlog.is_overfull and job.delivery.attempt == 1
        items = job.begin(reading, self._costs[model].item_ms)
        backlog.measured(job.cost_left_ms)
        backlog.opened(job.cost_left_ms)  # and closed again where it is given back
        self._work_changed.set()
        if is_refused:
            telemetry.GIVEN_BACK_JOBS.labels(model).inc()
            return False
        for item in items:
            self._batchers[model].add(item)
        for device in self._devices:
            device.wake()
        return True

    def _on_work_done(self, model: str, work_ms: float) -> None:
        self._backlogs[model].closed(work_ms)
        self._work_changed.set()

    def _on_cancel(self, payload: bytes) -> None:
        try:
            self._ledger.cancelled.add(decode_cancel(payload).job_ids)
        except msgspec.DecodeError as error:
            _log.warning("a cancellation cannot be read: %s", error)

    def _reader(self, name: str, card: Loaded) -> JobReader:
        model = self._models[name]
        if isinstance(model.tokenizer, RawTexts):
            return ParseReader(model.tokenizer, model.preset.facts, card)
        return Reader(model.tokenizer, model.preset.facts, card, model.space)

    def _served(self, place: Place) -> dict[str, Served]:
        return {
            name: Served(
                order=Load(
                    model=name,
                    folder=str(model.folder),
                    dtype=model.preset.tuning.dtype,
                    device=place.device,
                    threads=place.threads,
                    task=engine_task(model.preset.facts),
                    cache=model.cache,
                ),
                batcher=self._batchers[name],
                cost=self._costs[name],
                batches_ahead=model.preset.tuning.batches_ahead,
                handoff_s=model.preset.tuning.handoff_ms / 1000,
            )
            for name, model in self._models.items()
        }

    async def _calibrate(self) -> None:
        """Measure the models whose costs no preset tells, for at most `calibration_s` each, before anything waits."""
        for name, model in self._models.items():
            is_unknown = model.preset.tuning.cost is None
            if is_unknown and self._worker.calibration_s and isinstance(model.tokenizer, Tokenizer):
                await calibration.calibrate(
                    name,
                    self._costs[name],
                    measure=partial(self._devices[0].measure, name),
                    shapes=_shapes(model),
                    sample=model.tokenizer.encode([calibration.TEXT])[0],
                    budget_s=self._worker.calibration_s,
                )


def _budget(model: ServedModel, *, bulk_share: float) -> Budget:
    tuning = model.preset.tuning
    return Budget(
        tokens_max=tuning.batch_tokens_max,
        items_max=tuning.batch_items_max,
        cost_ms_max=tuning.batch_ms_max,
        max_wait_s=tuning.max_wait_ms / 1000,
        length_bands=tuning.length_bands,
        bulk_share=bulk_share,
    )


def _shapes(model: ServedModel) -> list[tuple[int, ...]]:
    tuning = model.preset.tuning
    return calibration_batches(
        tokens_max=model.tokenizer.tokens_max,
        batch_tokens_max=tuning.batch_tokens_max,
        batch_items_max=tuning.batch_items_max,
    )


def _backlog_ms(model: ServedModel, cost: CostModel, devices: int) -> float:
    """Work to have at hand for so many devices."""
    tuning = model.preset.tuning
    batch_ms = min(tuning.batch_ms_max, cost.full_batch_ms(tuning.batch_tokens_max))
    return tuning.backlog_batches * batch_ms * devices
