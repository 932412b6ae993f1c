"""Parts of a node for unit tests: a queue and deliveries that record, and an engine that runs in process."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import cast

import numpy as np
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from appliance.errors import ApplianceError, EngineFailed
from appliance.jobs import Embed, Event, Job, Lane, Reply, decode_replies, encode_job
from appliance.queue.base import Delivery, Pull
from appliance.queue.subjects import ALL_GATEWAYS
from appliance.workers.device import EngineFactory
from appliance.workers.engine_process import EngineDied, EngineOutOfMemory, EngineRefused
from appliance.workers.open_job import Item, OpenJob
from appliance.workers.read_job import Reading, rows
from appliance.workers.tokenize import Tokenizer
from appliance.workers.tokens import Tokens
from appliance.workers.wire import Encoded, Load, Loaded

WIDTH = 2
FAR_S = 4e9  # a deadline nobody lives to see


class RecordedDelivery:
    """A delivery that notes its settlements, in order; `trail` may be shared with a queue to see their order."""

    def __init__(self, payload: bytes, *, attempt: int = 1, trail: list[str] | None = None) -> None:
        self.payload = payload
        self.attempt = attempt
        self.settlements: list[str] = []
        self.trail = trail if trail is not None else []
        self.burial_fault: ApplianceError | None = None

    async def ack(self) -> None:
        self._note("ack")

    async def extend(self) -> None:
        self._note("extend")

    async def give_back(self, *, delay_s: float = 0.0) -> None:
        self._note("give back")

    async def bury(self, reason: str) -> None:
        if self.burial_fault is not None:
            raise self.burial_fault
        self._note(f"bury: {reason}")

    def _note(self, what: str) -> None:
        self.settlements.append(what)
        self.trail.append(what)


class RecordingNodeQueue:
    """A node's queue that keeps its replies, by gateway, and refuses them when told to."""

    def __init__(self, *, payload_bytes_max: int = 1_000_000) -> None:
        self.payload_bytes_max = payload_bytes_max
        self.sent: list[tuple[str, list[Reply]]] = []
        self.sizes: list[int] = []
        self.refusal: ApplianceError | None = None
        self.trail: list[str] = []
        self.announced: list[Event] = []  # to all gateways

    def pull(
        self, *, model: str, lane: Lane, on_delivery: Callable[[Delivery], None]
    ) -> AbstractAsyncContextManager[Pull]:
        raise AssertionError("nothing here pulls")

    async def reply(self, reply_to: str, payload: bytes) -> None:
        if self.refusal is not None:
            raise self.refusal
        if reply_to == ALL_GATEWAYS:
            self.announced += [reply.event for reply in decode_replies(payload)]
            return
        self.sent.append((reply_to, decode_replies(payload)))
        self.sizes.append(len(payload))
        self.trail.append("reply")

    def on_cancel(self, callback: Callable[[bytes], None]) -> None:
        raise AssertionError("nothing here listens")

    @property
    def replies(self) -> list[Reply]:
        return [reply for _, replies in self.sent for reply in replies]


async def until(is_so: Callable[[], bool]) -> None:
    """Let the event loop and its threads work until this holds. Raises TimeoutError after five seconds."""
    async with asyncio.timeout(5):
        while not is_so():  # noqa: ASYNC110 - no event stands for every condition
            await asyncio.sleep(0)


def job_of(
    job_id: str = "job",
    inputs: Sequence[str] = ("a",),
    *,
    model: str = "m",
    first_index: int = 0,
    deadline_s: float = FAR_S,
    reply_to: str = "replies.g",
    attempt_base: int = 0,
    lane: Lane = "interactive",
    width: int | None = None,
) -> Job:
    return Job(
        id=job_id,
        model=model,
        task=Embed(inputs=tuple(inputs), width=width),
        reply_to=reply_to,
        deadline_s=deadline_s,
        first_index=first_index,
        attempt_base=attempt_base,
        lane=lane,
    )


def tokens_of(*ids: int, is_truncated: bool = False) -> Tokens:
    """A tokenized text; the in-process engine goes by its first id."""
    return Tokens(np.array(ids, dtype="<i4").tobytes(), len(ids), is_truncated)


def open_job_of(job: Job, delivery: RecordedDelivery | None = None, *, arrived_s: float = 0.0) -> OpenJob:
    return OpenJob(job, delivery or RecordedDelivery(encode_job(job)), arrived_s=arrived_s, extended_s=arrived_s)


def item_ms(tokens: int) -> float:
    """What a text costs: a millisecond a token."""
    return float(tokens)


def reading_of(items: Sequence[Tokens]) -> Reading:
    """An embedding's inputs, read."""
    return Reading(list(items), rows)


def items_of(*ids: int) -> list[Item]:
    """One item per id, each of a job of its own."""
    return [
        item
        for number in ids
        for item in open_job_of(job_of(f"job-{number}")).begin(reading_of([tokens_of(number)]), item_ms)
    ]


def encoded_of(*firsts: float, width: int = WIDTH, bad: tuple[int, ...] = ()) -> Encoded:
    rows = np.array([[first] * width for first in firsts], dtype="<f4").tobytes()
    return Encoded(1, rows, width, bad, 0.001)


def word_tokenizer(words: Iterable[str], *, tokens_max: int = 4) -> Tokenizer:
    """Each word is one token, whose id is its place in `words`."""
    vocabulary = {word: number for number, word in enumerate(["[UNK]", *words])}
    rust = RustTokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    rust.pre_tokenizer = Whitespace()
    return Tokenizer(rust, tokens_max)


@dataclass
class Machine:
    """Where in-process engines run, one life after the other: how each text (by its first id) fares, and what ran."""

    width: int = WIDTH
    killers: frozenset[int] = frozenset()  # the engine dies on a batch with one of these
    refused: frozenset[int] = frozenset()  # a batch with one of these is refused
    not_finite: frozenset[int] = frozenset()
    tokens_before_oom: int = 1_000_000
    deaths_at_start: int = 0  # so many lives end before they begin
    load_fault: EngineFailed | None = None
    load_is_held: bool = False  # models never come to be loaded
    is_held: bool = False  # batches wait for `release`
    lives: int = 0
    batches: list[list[int]] = field(default_factory=list)  # the first ids of each batch that was begun
    now: "ProcessLike | None" = None

    def factory(self) -> AbstractAsyncContextManager["ProcessLike"]:
        return self._life()

    @property
    def engine_factory(self) -> EngineFactory:
        return cast("EngineFactory", self.factory)

    def release(self) -> None:
        """Let everything run that is held, and whatever comes."""
        self.is_held = False
        if self.now is not None:
            self.now.run_on()

    @asynccontextmanager
    async def _life(self) -> AsyncIterator["ProcessLike"]:
        self.lives += 1
        if self.lives <= self.deaths_at_start:
            raise EngineDied("the engine died: it never came up", stderr_tail=["one", "its last words"])
        self.now = ProcessLike(self)
        try:
            yield self.now
        finally:
            self.now.die()


@dataclass
class _Asked:
    ids: list[int]
    lengths: list[int]
    answer: "asyncio.Future[Encoded]"


class ProcessLike:
    """`EngineProcess` as a device sees it: answers in order, one batch in hand at a time, the others behind it."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._asked: deque[_Asked] = deque()
        self._dead: asyncio.Future[EngineDied] = asyncio.get_running_loop().create_future()

    async def load(self, order: Load) -> Loaded:
        if self._machine.load_fault is not None:
            raise self._machine.load_fault
        if self._machine.load_is_held:
            raise await self.died()
        return Loaded(order.model, self._machine.width, 512, order.dtype, 1, 0.0)

    async def encode(
        self,
        model: str,
        ids: bytes,
        lengths: Sequence[int],
        second_starts: Sequence[int] = (),
        *,
        per_token: Sequence[int] = (),
        texts: Sequence[str] = (),
    ) -> Encoded:
        if self._dead.done():
            raise EngineDied("the engine died")
        values = np.frombuffer(ids, dtype="<i4")
        starts = np.cumsum([0, *lengths[:-1]])
        answer: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        self._asked.append(_Asked([int(values[start]) for start in starts], list(lengths), answer))
        asyncio.get_running_loop().call_soon(self._step)
        return await answer

    async def died(self) -> EngineDied:
        return await asyncio.shield(self._dead)

    @property
    def outstanding(self) -> int:
        return len(self._asked)

    def die(self) -> None:
        """As when the process is gone."""
        if not self._dead.done():
            self._dead.set_result(EngineDied("the engine died"))
        for number, asked in enumerate(self._asked):
            if not asked.answer.done():
                asked.answer.set_exception(EngineDied("the engine died", was_begun=number == 0))
        self._asked.clear()

    def run_on(self) -> None:
        for _ in range(len(self._asked)):
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        machine = self._machine
        if machine.is_held or not self._asked:
            return
        asked = self._asked[0]
        machine.batches.append(asked.ids)
        if machine.killers.intersection(asked.ids):
            self.die()
            return
        self._asked.popleft()
        if asked.answer.done():
            return
        if machine.refused.intersection(asked.ids):
            asked.answer.set_exception(EngineRefused("a token is out of range"))
        elif sum(asked.lengths) > machine.tokens_before_oom:
            asked.answer.set_exception(EngineOutOfMemory("out of memory"))
        else:
            bad = tuple(number for number, first in enumerate(asked.ids) if first in machine.not_finite)
            asked.answer.set_result(encoded_of(*asked.ids, width=machine.width, bad=bad))
