"""From deliveries to tokenized items: what is read, what is buried, and what is told without being read."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

import msgspec
import pytest

from appliance.errors import ApplianceError, QueueUnavailable
from appliance.jobs import Detokenize, Done, Embed, Failed, Generate, Job, Tokenize, Tokenized, encode_job
from appliance.presets import Facts, Prompts
from appliance.workers.intake import JOBS_A_HOP_MAX, ON_THE_SPOT_BYTES_MAX, Intake
from appliance.workers.ledger import Ledger
from appliance.workers.open_job import OpenJob
from appliance.workers.prompts import ModelPrompts
from appliance.workers.read_job import Reading
from appliance.workers.reading import Reader
from appliance.workers.tokenize import Tokenizer
from appliance.workers.vector_space import VectorSpace
from appliance.workers.wire import Loaded
from tests.node_parts import (
    WIDTH,
    RecordedDelivery,
    RecordingNodeQueue,
    job_of,
    reading_of,
    tokens_of,
    until,
    word_tokenizer,
)

WORDS = ("a", "b", "c", "query:")


def reader_of(tokenizer: Tokenizer, prompts: Prompts) -> Reader:
    space = VectorSpace("m", prompts=ModelPrompts(prompts.query, prompts.document))
    return Reader(tokenizer, Facts("m"), Loaded("m", WIDTH, 8, "float32", 0, 0.0), space)


class Bench:
    """An intake of model `m` that has read `read`."""

    def __init__(self) -> None:
        self.queue = RecordingNodeQueue()
        self.ledger = Ledger(self.queue, on_work_done=lambda model, tokens: None)
        reader = reader_of(word_tokenizer(WORDS), Prompts(query="query: "))
        self.intake = Intake(
            self.ledger, readers={"m": reader}, deliveries_max=3, on_read=self._on_read, on_round=self._on_round
        )
        self.read: list[tuple[str, list[int]]] = []
        self.is_overfull = False
        self.rounds = 0

    def _on_round(self) -> None:
        self.rounds += 1

    async def _on_read(self, job: OpenJob, reading: Reading) -> bool:
        if not reading.items:
            await self.ledger.answer(job, reading)
            return True
        self.read.append((job.job.id, [tokens.count for tokens in reading.items]))
        return not self.is_overfull

    def deliver(self, job: Job | bytes, *, attempt: int = 1, fault: ApplianceError | None = None) -> RecordedDelivery:
        payload = job if isinstance(job, bytes) else encode_job(job)
        delivery = RecordedDelivery(payload, attempt=attempt, trail=self.queue.trail)
        delivery.burial_fault = fault
        self.intake.deliver("m", delivery)
        return delivery

    @asynccontextmanager
    async def running(self, *, until_set: threading.Event | None = None) -> AsyncIterator[None]:
        """With one thread to tokenize on, which is busy until then."""
        with ThreadPoolExecutor(1) as pool:
            if until_set is not None:
                pool.submit(until_set.wait, 5)
            task = asyncio.create_task(self.intake.run(pool))
            try:
                yield
            finally:
                assert not task.done(), "the intake ended by itself"
                task.cancel()
                await asyncio.wait({task})

    async def until_read(self) -> None:
        """Nothing that was delivered is unread."""
        await until(lambda: self.intake.unread("m") == 0)

    def failures(self) -> list[Failed]:
        return [reply.event for reply in self.queue.replies if isinstance(reply.event, Failed)]


async def test_a_delivery_becomes_tokens() -> None:
    bench = Bench()
    async with bench.running():
        bench.deliver(job_of("j", ["a b", "c"]))
        assert bench.intake.unread("m") == 1
        await bench.until_read()

    assert bench.read == [("j", [2, 1])]
    assert len(bench.ledger) == 1


async def test_more_than_one_hops_worth_is_read_in_order() -> None:
    bench = Bench()
    count = 2 * JOBS_A_HOP_MAX + 1
    for number in range(count):
        bench.deliver(job_of(f"j{number}"))
    async with bench.running():
        await bench.until_read()

    assert [job_id for job_id, _ in bench.read] == [f"j{number}" for number in range(count)]


async def test_the_last_allowed_delivery_is_served_and_one_more_is_buried() -> None:
    bench = Bench()
    async with bench.running():
        bench.deliver(job_of("last"), attempt=3)
        buried = bench.deliver(job_of("over"), attempt=4)
        await bench.until_read()

    assert [job_id for job_id, _ in bench.read] == ["last"]
    assert buried.settlements == ["bury: job over: 3 deliveries did not finish it"]
    assert [failed.code for failed in bench.failures()] == ["undeliverable"]


async def test_deliveries_to_a_node_that_stood_still_bury_no_job() -> None:
    bench = Bench()
    async with bench.running():
        late = [bench.deliver(job_of("j"), attempt=attempt) for attempt in range(2, 7)]
        await bench.until_read()
        buried = bench.deliver(job_of("j"), attempt=9)
        await bench.until_read()

    assert [delivery.settlements for delivery in late] == [[]] * 5
    assert buried.settlements == ["bury: job j: 3 deliveries did not finish it"]


@pytest.mark.parametrize("payload", [b"", b"garbage", b"\x80", encode_job(job_of("j"))[:-3]])
async def test_what_is_no_job_is_buried(payload: bytes) -> None:
    bench = Bench()
    async with bench.running():
        buried = bench.deliver(payload)
        bench.deliver(job_of("next"))
        await bench.until_read()

    assert len(buried.settlements) == 1
    assert buried.settlements[0].startswith("bury: not a job: ")
    assert bench.read == [("next", [1])]


@pytest.mark.parametrize(("sent", "attempt"), [(b"garbage", 1), (job_of("over"), 4)])
async def test_dead_letters_out_of_reach_harm_nobody_else(sent: Job | bytes, attempt: int) -> None:
    bench = Bench()
    async with bench.running():
        left = bench.deliver(sent, attempt=attempt, fault=QueueUnavailable("away"))
        bench.deliver(job_of("next"))
        await bench.until_read()

    assert left.settlements == []  # it is delivered again
    assert bench.read == [("next", [1])]
    assert len(bench.ledger) == 1


async def test_a_job_for_another_model_is_buried() -> None:
    bench = Bench()
    async with bench.running():
        buried = bench.deliver(job_of("j", model="other"))
        await bench.until_read()

    assert buried.settlements == ["bury: job j: a job of other was queued for m"]
    assert [failed.code for failed in bench.failures()] == ["undeliverable"]


async def test_a_late_job_is_told_so_without_being_read() -> None:
    bench = Bench()
    async with bench.running():
        late = bench.deliver(job_of("j", deadline_s=time.time() - 1))
        await bench.until_read()

    assert bench.read == []
    assert [failed.code for failed in bench.failures()] == ["deadline_exceeded"]
    assert late.settlements == ["ack"]


async def test_a_job_cancelled_before_it_came_is_dropped() -> None:
    bench = Bench()
    bench.ledger.cancelled.add(["j"])
    async with bench.running():
        dropped = bench.deliver(job_of("j"))
        await bench.until_read()

    assert (bench.read, bench.queue.replies, dropped.settlements) == ([], [], ["ack"])


async def test_a_job_that_cannot_be_read_is_refused_and_its_neighbours_are_not() -> None:
    bench = Bench()
    async with bench.running():
        refused = bench.deliver(job_of("wide", width=WIDTH + 1))
        bench.deliver(job_of("next", width=WIDTH))
        await bench.until_read()

    (failed,) = bench.failures()
    assert (failed.code, failed.param) == ("invalid_value", "dimensions")
    assert refused.settlements == ["ack"]
    assert bench.read == [("next", [1])]


async def test_what_was_not_opened_is_given_back() -> None:
    bench = Bench()
    first, second = bench.deliver(job_of("a")), bench.deliver(job_of("b"))

    await bench.intake.give_back()

    assert (first.settlements, second.settlements) == (["give back"], ["give back"])
    assert bench.intake.unread("m") == 0


def test_a_reader_puts_the_prompt_of_the_intent_first() -> None:
    reader = reader_of(word_tokenizer(WORDS, tokens_max=8), Prompts(query="a a "))

    plain, asked = (
        reader.read(
            Job(
                id="j",
                model="m",
                task=Embed(inputs=("b",), intent=intent),
                reply_to="r",
                deadline_s=1.0,
            )
        )
        for intent in (None, "query")
    )

    assert (plain.items[0].count, asked.items[0].count) == (1, 3)


async def test_a_job_that_is_not_taken_on_goes_back() -> None:
    bench = Bench()
    bench.is_overfull = True
    async with bench.running():
        delivery = bench.deliver(job_of("j", ["a b", "c"]))
        await bench.until_read()
        await until(lambda: bool(delivery.settlements))

    assert delivery.settlements == ["give back"]
    assert bench.queue.replies == []
    assert len(bench.ledger) == 0


async def test_a_job_that_needs_no_device_is_answered_at_once() -> None:
    bench = Bench()
    async with bench.running():
        delivery = bench.deliver(Job("j", "m", Tokenize("a c"), "replies.g", 4e9))
        refused = bench.deliver(Job("k", "m", Detokenize((1, 77)), "replies.g", 4e9))
        await until(lambda: bool(delivery.settlements) and bool(refused.settlements))

    assert bench.read == []
    tokenized, done, failed = (reply.event for reply in bench.queue.replies)
    assert (tokenized, done) == (Tokenized((1, 3), ("a", "c")), Done())
    assert isinstance(failed, Failed)
    assert failed.param == "tokens[1]"
    assert (delivery.settlements, refused.settlements) == (["ack"], ["ack"])
    assert len(bench.ledger) == 0


async def test_a_late_job_is_no_longer_counted_as_unread_once_the_round_is_told() -> None:
    bench = Bench()
    async with bench.running():
        bench.deliver(job_of("late", ["a"], deadline_s=1.0))
        await until(lambda: bench.rounds > 0)
        assert bench.intake.unread("m") == 0


async def test_a_tokenizer_that_breaks_fails_its_job_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()

    def broken(_: object, job: Job) -> Reading:
        if job.id == "bad":
            raise RuntimeError("from the depths of Rust")
        return reading_of([tokens_of(1)])

    monkeypatch.setattr(Reader, "read", broken)
    async with bench.running():
        bench.deliver(job_of("bad", ["a"]))
        bench.deliver(job_of("good", ["b"]))
        await until(lambda: len(bench.read) == 1 and bool(bench.failures()))

    assert [job_id for job_id, _ in bench.read] == ["good"]
    assert [failed.code for failed in bench.failures()] == ["internal_error"]
    assert "Rust" not in bench.failures()[0].message


@pytest.mark.parametrize(
    "task",
    [
        Generate(prompt="x", form="json_schema", pattern=b"{}"),
        Generate(prompt="x", form="regex", pattern=b"a"),
        Generate(prompt="x", tools=b"[]"),
    ],
)
async def test_what_is_compiled_is_never_read_on_the_event_loop(task: Generate) -> None:
    bench = Bench()
    free = threading.Event()
    async with bench.running(until_set=free):
        bench.deliver(msgspec.structs.replace(job_of("short"), task=task))
        for _ in range(10):
            await asyncio.sleep(0)
        assert bench.intake.unread("m") == 1

        free.set()
        await bench.until_read()


async def test_a_short_job_waits_for_no_thread_and_a_long_one_does() -> None:
    bench = Bench()
    free = threading.Event()
    async with bench.running(until_set=free):
        bench.deliver(job_of("short"))
        await until(lambda: len(bench.read) == 1)
        bench.deliver(job_of("long", ["a" * ON_THE_SPOT_BYTES_MAX]))
        await until(lambda: bench.intake.unread("m") == 1)
        await asyncio.sleep(0)
        assert [job_id for job_id, _ in bench.read] == ["short"]

        free.set()
        await until(lambda: len(bench.read) == 2)
