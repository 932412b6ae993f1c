"""The node of one model that writes texts: pulls its jobs, begins their sequences, and sends on what the engine writes.

    queue ─ deliveries ─▶ Intake (template, tokens, grammar) ─ Begin ─▶ engine ─ Step ─▶ text ─▶ replies

The engine batches by itself: every sequence that has a place takes part in each of its steps. A streamed job is
settled with its first part and never done again; any other is acknowledged when it is answered, like a batch's.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from appliance import telemetry
from appliance.errors import ApplianceError, DeadlinePassed, EngineFailed, StartupError
from appliance.jobs import Beat, Decide, Done, Event, Failed, Generate, Job, Lane, Reply, Text, Tokenized
from appliance.presets import Preset
from appliance.queue.base import NodeQueue
from appliance.settings import QueueSettings, WorkerSettings
from appliance.workers.engine_process import EngineDied
from appliance.workers.open_job import OpenJob
from appliance.workers.read_job import JobReader, at_once
from appliance.workers.revival import kept_alive
from appliance.workers.serving import Serving
from appliance.workers.wire import Load, Loaded, Step
from appliance.workers.writing.engine import TextEngineProcess
from appliance.workers.writing.figures import Figures
from appliance.workers.writing.open_text import OpenDecision, OpenSequence, OpenText, OpenWriting
from appliance.workers.writing.writer import Prepared, Weighing, Writer

BEAT_S: Final = 1.0
# Sequences begun beyond those that have a place: a place that gets free is taken within the same step.
AHEAD: Final = 2
DEATHS_MAX: Final = 2  # of engines under one job: then the job is at fault

_log = logging.getLogger(__name__)


class WrittenModel(msgspec.Struct, frozen=True):
    """A model this node writes with: its preset, its verified files, and what reads them."""

    preset: Preset
    folder: Path
    writer: Writer

    @property
    def name(self) -> str:
        """As jobs carry it."""
        return self.preset.facts.name


class WritingPlace(msgspec.Struct, frozen=True):
    """Where the engine runs."""

    name: str  # for metrics and logs: "cpu", "cuda:1"
    device: str
    threads: int
    engine_factory: Callable[[], AbstractAsyncContextManager[TextEngineProcess]]


# A job, read: a text or decisions to write, or what needs no engine.
Reading = Prepared | list[Weighing] | Tokenized | Text


class WritingNode(Serving[Reading]):
    """See the module."""

    def __init__(
        self,
        queue: NodeQueue,
        *,
        model: WrittenModel,
        place: WritingPlace,
        worker: WorkerSettings,
        settings: QueueSettings,
    ) -> None:
        super().__init__(queue, [model.name], worker=worker, settings=settings)
        self._model = model
        self._place = place
        self._engine: TextEngineProcess | None = None
        self._figures = Figures(model.name, place.name)
        self._card: asyncio.Future[Loaded] = asyncio.get_running_loop().create_future()
        self._numbers = itertools.count(1)
        self._jobs: dict[str, set[OpenWriting]] = {}  # by the job's id: one that is submitted again may be here twice
        self._pending: deque[OpenSequence] = deque()
        self._running: dict[int, OpenSequence] = {}
        self._sending = asyncio.Lock()  # replies of a job are sent in the order in which they are numbered
        self._gone: list[OpenWriting] = []  # cancelled, to be settled
        self._something_gone = asyncio.Event()

    # What `Serving` asks for.

    def _device_loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [self._run_engine(), self._tend()]

    async def _cards(self) -> list[Loaded]:
        return [await asyncio.shield(self._card)]

    def _reader(self, name: str, card: Loaded) -> JobReader[Reading]:
        self._model.writer.narrow(card.tokens_max)
        return _Reader(self._model.writer)

    def _wish(self, model: str, lane: Lane) -> int | None:
        room = self._sequences_max + AHEAD - len(self._running) - len(self._pending) - self._unread(model)
        if lane == "bulk" and room > 0:
            return max(1, round(room * self._worker.bulk_share))
        return max(0, room)

    async def _on_read(self, job: OpenJob, reading: Reading) -> bool:
        writing: OpenWriting
        match (job.job.task, reading):
            case (Generate() as task, Prepared() as prepared):
                writing = OpenText(job, task, prepared, model=self._model.name)
            case (Decide() as task, list() as weighings):
                writing = OpenDecision(job, task, weighings, model=self._model.name)
            case (_, Tokenized() | Text() as part):
                await self._ledger.answer(job, at_once(part))
                return True
            case _:
                raise AssertionError("read as another task")
        self._jobs.setdefault(job.job.id, set()).add(writing)
        self._pending.extend(OpenSequence(writing, number) for number in range(len(writing.orders)))
        if job.job.id in self._ledger.cancelled:
            self._on_cancelled([job.job.id])
        self._begin_more()
        return True

    def _on_cancelled(self, job_ids: Sequence[str]) -> None:
        """The engine hears of it at once; what else there is to do waits a moment."""
        for job_id in job_ids:
            for writing in self._jobs.get(job_id, ()):
                writing.is_over = True
                self._gone.append(writing)
        if self._gone:
            self._abort(self._gone)
            self._something_gone.set()

    def _is_done(self) -> bool:
        return not self._jobs and not len(self._ledger)

    async def _close(self) -> None:
        """Texts that clients have seen parts of cannot be written on elsewhere."""
        for writing in [writing for writings in self._jobs.values() for writing in writings]:
            if writing.is_begun:
                await self._fail(writing, EngineFailed("the server stopped while it wrote the text; try again"))

    # The engine.

    @property
    def _sequences_max(self) -> int:
        return self._card.result().sequences_max

    @property
    def _places(self) -> int:
        """Now; none while there is no engine."""
        return self._sequences_max if self._engine is not None else 0

    async def _run_engine(self) -> None:
        await kept_alive(self._place.name, self._place.engine_factory, self._serve, was_ready=self._card.done)

    async def _serve(self, engine: TextEngineProcess) -> NoReturn:
        """Raises EngineDied."""
        card = await self._load(engine)
        engine.listen(self._on_step)
        if not self._card.done():
            self._card.set_result(card)
        self._engine = engine
        try:
            self._begin_more()
            death = await engine.died()
        finally:
            self._engine = None
        await self._survive_engine()
        raise death

    async def _load(self, engine: TextEngineProcess) -> Loaded:
        preset = self._model.preset
        tuning = preset.tuning.generation
        assert tuning is not None, "a model that writes has it: see the composition root"
        order = Load(
            model=self._model.name,
            folder=str(self._model.folder),
            dtype=preset.tuning.dtype,
            device=self._place.device,
            threads=self._place.threads,
            task="generate",
            sequences_max=tuning.sequences_max,
            tokens_max=self._model.writer.tokens_max,
            flags=tuning.flags,
        )
        try:
            card = await engine.load(order)
        except EngineDied:
            raise
        except EngineFailed as error:
            raise StartupError(
                f"model {order.model} cannot be loaded on {self._place.name}: {error.message}"
            ) from error
        telemetry.RESIDENT_BYTES.labels(order.model, self._place.name).set(card.weights_bytes)
        _log.info(
            "%s is resident on %s after %.1f s, %s, %s: %d texts at once, each of up to %d tokens with its prompt",
            order.model,
            self._place.name,
            card.load_s,
            card.dtype,
            tuning.runtime,
            card.sequences_max,
            min(order.tokens_max, card.tokens_max),
        )
        return card

    def _begin_more(self) -> None:
        """Hand sequences to the engine, as many as it has places for and a few ahead.

        A job that saw an engine die runs alone: if that engine dies too, it was the job.
        """
        while self._engine is not None and self._pending and len(self._running) < self._sequences_max + AHEAD:
            writing = self._pending[0].writing
            others = [one for one in self._running.values() if one.writing is not writing]
            if others and (writing.deaths or any(one.writing.deaths for one in others)):
                return
            sequence = next(self._numbers)
            begun = self._running[sequence] = self._pending.popleft()
            self._engine.begin(msgspec.structs.replace(writing.orders[begun.number], sequence=sequence))

    async def _on_step(self, step: Step) -> None:
        """What the engine wrote goes to those who wait for it."""
        self._figures.step(step, self._running)
        async with self._sending:
            said: dict[OpenWriting, list[Event]] = {}
            for grown in step.grown:
                found = self._running.get(grown.sequence)
                if found is None:
                    continue  # aborted
                if grown.finish:
                    del self._running[grown.sequence]
                events = found.writing.take(found.number, grown)
                if events:
                    said.setdefault(found.writing, []).extend(events)
            over = [writing for writing in said if writing.is_over]
            self._abort(over)
            self._begin_more()
            await self._say(said)

    async def _survive_engine(self) -> None:
        """The engine is gone, and with it every sequence that it had."""
        dead = dict.fromkeys(one.writing for one in self._running.values())
        self._running.clear()
        again: list[OpenSequence] = []
        failed = 0
        for writing in dead:
            writing.deaths += 1
            if writing.deaths >= DEATHS_MAX:
                words = "job %s of %s fails: %d engines died while they wrote it"
                _log.error(words, writing.opened.job.id, self._model.name, writing.deaths)
            if writing.is_begun or writing.deaths >= DEATHS_MAX:
                failed += 1
                await self._fail(writing, EngineFailed("the engine died while it wrote the answer; try again"))
            else:
                writing.restart()
                self._pending = deque(one for one in self._pending if one.writing is not writing)
                again += [OpenSequence(writing, number) for number in range(len(writing.orders))]
        self._pending.extendleft(reversed(again))
        if dead:
            words = "the engine of %s had %d jobs in hand: %d are begun anew, %d fail"
            _log.warning(words, self._model.name, len(dead), len(dead) - failed, failed)

    def _abort(self, writings: Iterable[OpenWriting]) -> None:
        """Nothing more of these is written."""
        dead = set(writings)
        if not dead:
            return
        self._pending = deque(one for one in self._pending if one.writing not in dead)
        numbers = [number for number, one in self._running.items() if one.writing in dead]
        for number in numbers:
            del self._running[number]
        if numbers and self._engine is not None:
            self._engine.abort(numbers)

    # What is said of jobs, and their ends.

    async def _say(self, said: dict[OpenWriting, list[Event]]) -> None:
        """Send events and settle what they settle. Under `_sending`."""
        answers: list[tuple[OpenJob, list[Reply]]] = [
            (writing.opened, writing.replies(events)) for writing, events in said.items()
        ]
        is_sent = not answers or await self._ledger.send(answers)
        for writing, events in said.items():
            opened = writing.opened
            writing.spoke_s = time.monotonic()
            if not is_sent:
                self._lose(writing)
            elif writing.is_over and opened.is_settled:
                self._ledger.ended(opened, outcome=_outcome(events))
            elif writing.is_over:
                await self._ledger.close(opened, outcome=_outcome(events))
            elif not opened.is_settled:
                await self._ledger.acknowledge(opened)
            if writing.is_over:
                self._forget(writing)
        self._pulls.changed()

    def _lose(self, writing: OpenWriting) -> None:
        """Its gateway is out of reach: a job that is not settled is delivered again, and a text begun has a hole."""
        self._ledger.forget(writing.opened, outcome="unanswered")
        self._forget(writing)

    async def _beat(self, quiet: Sequence[OpenWriting]) -> None:
        """Let gateways hear that these are at work. Under `_sending`."""
        for writing in quiet:
            writing.spoke_s = time.monotonic()
        beats = [(writing.opened, writing.replies([Beat()])) for writing in quiet]
        if quiet and not await self._ledger.send(beats):
            for writing in quiet:
                self._lose(writing)

    async def _fail(self, writing: OpenWriting, error: ApplianceError) -> None:
        """The job ends with this error."""
        self._abort([writing])
        async with self._sending:
            await self._say({writing: writing.failure(error)})

    def _forget(self, writing: OpenWriting) -> None:
        writing.is_over = True
        self._abort([writing])
        job_id = writing.opened.job.id
        others = self._jobs.get(job_id)
        if others is not None:
            others.discard(writing)
            if not others:
                del self._jobs[job_id]

    async def _tend(self) -> None:
        """Settle what was cancelled or is late, and let gateways hear that texts under way live on."""
        while True:
            self._figures.load(places=self._places, begun=len(self._running), pending=len(self._pending))
            self._something_gone.clear()
            gone, self._gone = self._gone, []
            for writing in gone:
                await self._ledger.drop_job(writing.opened)
                self._ledger.ended(writing.opened, outcome="cancelled")  # a stream, which is settled already
                self._forget(writing)
            now_s = time.time()
            writings = [writing for found in self._jobs.values() for writing in found if not writing.is_over]
            for writing in writings:
                if writing.opened.job.deadline_s <= now_s:
                    await self._fail(writing, DeadlinePassed("the deadline passed before the answer was written"))
            quiet_s = time.monotonic() - BEAT_S
            async with self._sending:
                # Of all that is at the engine: a model that writes long texts for nobody's eyes yet lives, too.
                at_work = {one.writing for one in self._running.values()}
                quiet = [
                    writing
                    for writing in at_work
                    if writing.may_beat and writing.spoke_s <= quiet_s and not writing.is_over
                ]
                await self._beat(quiet)
            try:
                async with asyncio.timeout(BEAT_S / 2):
                    await self._something_gone.wait()
            except TimeoutError:
                pass


def _outcome(events: Sequence[Event]) -> str:
    """Of a job that is over, by the last that is said of it."""
    match events[-1]:
        case Done():
            return "done"
        case Failed(code=code):
            return code
        case _:  # it was cancelled while this was sent
            return "cancelled"


class _Reader:
    """`JobReader` of a model that writes."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def read(self, job: Job) -> Reading:
        """Blocks. Raises InvalidRequest or TooLong, naming the field."""
        match job.task:
            case Generate() as task:
                return self._writer.prepare(task)
            case Decide() as task:
                return self._writer.prepare_decide(task)
            case other:
                return self._writer.answer_at_once(other)
