"""The node: pulls the jobs of the models it holds, tokenizes, batches, runs them on its devices, replies, settles.

    queue ─ deliveries ─▶ Intake (decode, tokenize) ─ items ─▶ Batcher ─▶ Device(s) ─ rows ─▶ Ledger (reply, then ack)

Everything here runs on one event loop and no engine code runs in it, so the queue is heard and jobs are extended
however busy the devices are. Several devices take from the same batchers: whichever is free takes the next batch.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from appliance import telemetry
from appliance.jobs import Lane
from appliance.presets import Preset
from appliance.queue.base import NodeQueue
from appliance.settings import QueueSettings, WorkerSettings
from appliance.workers import calibration
from appliance.workers.backlog import Backlog
from appliance.workers.batcher import Batcher, Budget
from appliance.workers.cost import UNKNOWN, CostModel, calibration_batches
from appliance.workers.device import Device, Place, Served
from appliance.workers.engine_task import engine_task
from appliance.workers.exchange import Exchange
from appliance.workers.open_job import Item, OpenJob
from appliance.workers.parse_reading import ParseReader
from appliance.workers.raw_texts import RawTexts
from appliance.workers.read_job import JobReader, Reading
from appliance.workers.reading import Reader
from appliance.workers.serving import Serving
from appliance.workers.tokenize import Tokenizer
from appliance.workers.vector_space import VectorSpace
from appliance.workers.wire import Load, Loaded


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


class Node(Serving[Reading]):
    """Serves models whose engines compute batches."""

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
        super().__init__(queue, [model.name for model in models], worker=worker, settings=settings)
        self._models = {model.name: model for model in models}
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

    def _device_loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [device.run() for device in self._devices]

    async def _cards(self) -> list[Loaded]:
        # Shielded: the devices go on loading whoever stops waiting for them.
        return [card for device in self._devices for card in await asyncio.shield(device.loaded)]

    def _wish(self, model: str, lane: Lane) -> int | None:
        backlog = self._backlogs[model]
        if backlog.is_overfull:
            return None
        wish = backlog.wish(unread_jobs=self._unread(model))
        if lane == "bulk" and wish:
            return max(1, round(wish * self._worker.bulk_share))
        return wish

    async def _on_read(self, job: OpenJob, reading: Reading) -> bool:
        """Take the job's items on; False when this node has far more than it can start soon.

        Only a first delivery is refused: however often nodes misjudge, a job moves on once at most.
        """
        if not reading.items:
            await self._ledger.answer(job, reading)
            return True
        model = job.job.model
        backlog = self._backlogs[model]
        is_refused = backlog.is_overfull and job.delivery.attempt == 1
        items = job.begin(reading, self._costs[model].item_ms)
        backlog.measured(job.cost_left_ms)
        backlog.opened(job.cost_left_ms)  # and closed again where it is given back
        self._pulls.changed()
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
        self._pulls.changed()

    def _reader(self, name: str, card: Loaded) -> JobReader[Reading]:
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

    async def _prepare(self) -> None:
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
