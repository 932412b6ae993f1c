"""How any node serves, whatever its devices do: load, pull, read, and at the end finish what is open."""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import msgspec

from appliance.errors import StartupError
from appliance.jobs import Lane, decode_cancel
from appliance.queue.base import Delivery, NodeQueue
from appliance.settings import QueueSettings, WorkerSettings
from appliance.workers.intake import Intake
from appliance.workers.ledger import Ledger
from appliance.workers.open_job import OpenJob
from appliance.workers.pulls import Pulls
from appliance.workers.read_job import JobReader
from appliance.workers.wire import Loaded

EXTENSIONS_PER_ACK_WAIT = 3

_log = logging.getLogger(__name__)
R = TypeVar("R")


class Serving(ABC, Generic[R]):
    """Serves its models until told to stop. `R` is what a job is, read."""

    def __init__(
        self, queue: NodeQueue, models: Sequence[str], *, worker: WorkerSettings, settings: QueueSettings
    ) -> None:
        self._queue = queue
        self._names = models
        self._worker = worker
        self._settings = settings
        self._ledger = Ledger(queue, on_work_done=self._on_work_done)
        self._pulls = Pulls(queue, models, deliver=self._deliver, wish=self._wish)
        self._intake: Intake[R] | None = None

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then finish what is open for at most `drain_s` and give the rest back.

        Raises StartupError (in an ExceptionGroup) when a model or an engine cannot be brought up.
        """
        with ThreadPoolExecutor(self._worker.tokenizer_threads, "tokenize") as pool:
            async with asyncio.TaskGroup() as group:
                loops = [group.create_task(loop) for loop in self._device_loops()]
                cards = await self._loaded(stop)
                if cards is None:
                    for task in loops:
                        task.cancel()
                    return
                await self._prepare()
                intake = self._intake = Intake(
                    self._ledger,
                    readers={name: self._reader(name, cards[name]) for name in self._names},
                    deliveries_max=self._settings.deliveries_max,
                    on_read=self._on_read,
                    on_round=self._pulls.changed,
                )
                self._queue.on_cancel(self._hear_cancel)
                loops += [group.create_task(intake.run(pool)) for _ in range(self._worker.tokenizer_threads)]
                loops.append(group.create_task(self._extend()))
                await self._pulls.run(stop)
                if not await self._pulls.settled(self._is_done, within_s=self._worker.drain_s):
                    _log.warning("%d jobs are given back unfinished", len(self._ledger))
                await self._close()
                for task in loops:
                    task.cancel()
            await intake.give_back()
            await self._ledger.give_back_all()

    @abstractmethod
    def _device_loops(self) -> "Sequence[Coroutine[Any, Any, None]]":
        """What keeps the devices at work, each until it is cancelled."""

    @abstractmethod
    async def _cards(self) -> list[Loaded]:
        """What the engines declare of the models, once every device holds them all. May be cancelled."""

    async def _prepare(self) -> None:
        """What else is to be done before anything is pulled."""

    @abstractmethod
    def _reader(self, name: str, card: Loaded) -> JobReader[R]:
        """How the jobs of this model are read."""

    @abstractmethod
    async def _on_read(self, job: OpenJob, reading: R) -> bool:
        """Take a job on; False gives it back."""

    @abstractmethod
    def _wish(self, model: str, lane: Lane) -> int | None:
        """See `Pulls`."""

    def _on_work_done(self, model: str, work_ms: float) -> None:
        """So much predicted work need not be done any more."""
        self._pulls.changed()

    def _on_cancelled(self, job_ids: Sequence[str]) -> None:
        """Nobody waits for these any more; the ledger knows it already. Must not block."""

    def _is_done(self) -> bool:
        """Whether nothing is open."""
        return not len(self._ledger)

    async def _close(self) -> None:
        """What is still open now is not finished here."""

    def _unread(self, model: str) -> int:
        return self._intake.unread(model) if self._intake is not None else 0

    def _deliver(self, model: str, delivery: Delivery) -> None:
        assert self._intake is not None, "nothing is pulled before there is an intake"
        self._intake.deliver(model, delivery)

    async def _loaded(self, stop: asyncio.Event) -> dict[str, Loaded] | None:
        """The cards by model; None when `stop` comes first."""
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

    async def _extend(self) -> None:
        interval_s = self._settings.ack_wait_s / EXTENSIONS_PER_ACK_WAIT
        while True:
            await asyncio.sleep(interval_s)
            await self._ledger.extend(age_s=interval_s)

    def _hear_cancel(self, payload: bytes) -> None:
        try:
            job_ids = decode_cancel(payload).job_ids
        except msgspec.DecodeError as error:
            _log.warning("a cancellation cannot be read: %s", error)
            return
        self._ledger.cancelled.add(job_ids)
        self._on_cancelled(job_ids)
