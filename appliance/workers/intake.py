"""From deliveries to tokenized items. Tokenizing runs on threads (the Rust tokenizers release the GIL).

Deliveries that arrive while the threads are busy are taken together: under load one hop to a thread serves many jobs.
A few short ones are read on the spot, since the hop would take longer than they do.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

import msgspec

from appliance import telemetry
from appliance.errors import ApplianceError, InternalError
from appliance.jobs import Job, decode_job
from appliance.queue.base import Delivery
from appliance.workers.ledger import Ledger, bury
from appliance.workers.open_job import OpenJob
from appliance.workers.read_job import JobReader, takes_long
from appliance.workers.received import Received

JOBS_A_HOP_MAX = 64
# Payloads that are read on the event loop. As many bytes of text take two milliseconds at worst, as a rule a tenth.
ON_THE_SPOT_BYTES_MAX = 4096

_log = logging.getLogger(__name__)


R = TypeVar("R")


class Intake(Generic[R]):
    """Opens deliveries, reads them, and passes them on. Bounded by what the node wishes for."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        readers: Mapping[str, JobReader[R]],
        deliveries_max: int,
        on_read: Callable[[OpenJob, R], Awaitable[bool]],
        on_round: Callable[[], None],
    ) -> None:
        """`on_read` gets each job with what was read; False gives the job back.

        `on_round` hears that `unread` has changed.
        """
        self._ledger = ledger
        self._readers = readers
        self._deliveries_max = deliveries_max
        self._on_read = on_read
        self._on_round = on_round
        self._received = Received()
        self._unread: dict[str, int] = dict.fromkeys(readers, 0)
        self._arrived: deque[tuple[str, Delivery]] = deque()
        self._something = asyncio.Event()

    def unread(self, model: str) -> int:
        """Jobs of the model that were delivered and are not read yet."""
        return self._unread[model]

    def deliver(self, model: str, delivery: Delivery) -> None:
        """A job arrived. Called by the queue, on the event loop."""
        self._unread[model] += 1
        self._arrived.append((model, delivery))
        self._something.set()

    async def run(self, pool: ThreadPoolExecutor) -> None:
        """Read what arrives until cancelled. Several may run at once; each keeps one thread of the pool busy."""
        while True:
            while not self._arrived:
                self._something.clear()
                await self._something.wait()
            models: list[str] = []
            opened: list[OpenJob] = []
            size = 0
            while self._arrived and len(models) < JOBS_A_HOP_MAX:
                model, delivery = self._arrived.popleft()
                models.append(model)
                size += len(delivery.payload)
                if job := await self._open(model, delivery):
                    opened.append(job)
            if size <= ON_THE_SPOT_BYTES_MAX and not any(takes_long(job.job.task) for job in opened):
                read = self._read_all(opened)
            else:
                read = await asyncio.get_running_loop().run_in_executor(pool, self._read_all, opened)
            for model in models:
                self._unread[model] -= 1
            self._on_round()
            for job, reading in zip(opened, read, strict=True):
                if isinstance(reading, ApplianceError):
                    await self._ledger.refuse(job, reading)
                elif not await self._on_read(job, reading):
                    await self._ledger.give_back(job)

    async def give_back(self) -> None:
        """This node stops and `run` has ended: what was delivered and not opened goes to whoever pulls next."""
        while self._arrived:
            model, delivery = self._arrived.popleft()
            self._unread[model] -= 1
            await delivery.give_back()

    async def _open(self, model: str, delivery: Delivery) -> OpenJob | None:
        """The job, if it is to be read; otherwise it is settled here."""
        try:
            job = decode_job(delivery.payload)
        except msgspec.DecodeError as error:
            await bury(delivery, f"not a job: {error}", model=model)
            return None
        opened = self._ledger.open(job, delivery)
        unfinished = delivery.attempt - 1 - self._received.add(job)  # by nodes that may have died of it
        if delivery.attempt > 1:
            telemetry.REDELIVERED_JOBS.labels(model).inc()
        if job.model != model:
            await self._ledger.bury(opened, f"a job of {job.model} was queued for {model}")
        elif unfinished >= self._deliveries_max:
            await self._ledger.bury(opened, f"{unfinished} deliveries did not finish it")
        elif not self._ledger.is_wanted(opened):
            await self._ledger.drop_job(opened)
        else:
            return opened
        return None

    def _read_all(self, jobs: Sequence[OpenJob]) -> list[R | ApplianceError]:
        return [self._read(job.job) for job in jobs]

    def _read(self, job: Job) -> R | ApplianceError:
        try:
            return self._readers[job.model].read(job)
        except ApplianceError as error:
            return error
        except Exception:
            # A tokenizer's own fault, on some text: that job fails, and the node serves on.
            _log.exception("the inputs of job %s cannot be tokenized", job.id)
            return InternalError("the inputs cannot be tokenized; the server's log has the details")
