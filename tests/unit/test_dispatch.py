"""From a request's jobs to its results: every order of replies, every way out, and nothing left behind by any."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
from prometheus_client import REGISTRY

from appliance import tally
from appliance.errors import (
    ApplianceError,
    BadVector,
    BodyTooLarge,
    ClientGone,
    DeadlinePassed,
    EngineFailed,
    InvalidRequest,
    Overloaded,
    QueueUnavailable,
)
from appliance.gateway import dispatch
from appliance.gateway.dispatch import SUBMISSION_STEP, Dispatcher
from appliance.gateway.pending_calls import Result
from appliance.jobs import (
    CANARY_PREFIX,
    Beat,
    Done,
    Embed,
    Event,
    Failed,
    Job,
    Lane,
    Reply,
    Rows,
    Usage,
    decode_job,
    encode_replies,
)
from tests.node_parts import until

WIDTH = 2


class RecordingQueue:
    """A gateway's queue that keeps what it is given, and refuses when told to."""

    reply_to = "replies.here"
    payload_bytes_max = 1_000_000

    def __init__(self) -> None:
        self.is_connected = True
        self.submitted: list[tuple[str, Job]] = []
        self.cancelled: list[str] = []
        self.refusal: ApplianceError | None = None
        self.refusals = 0
        self.grew = asyncio.Event()

    async def submit(self, *, job_id: str, message_id: str, model: str, lane: Lane, payload: bytes) -> None:
        if self.refusal is not None:
            self.refusals += 1
            raise self.refusal
        job = decode_job(payload)
        assert (job.id, job.model, job.lane) == (job_id, model, lane)
        self.submitted.append((message_id, job))
        self.grew.set()

    async def cancel(self, job_ids: Sequence[str]) -> None:
        self.cancelled += job_ids

    async def holds(self, count: int) -> None:
        """Return when this many submissions have come."""
        async with asyncio.timeout(5):
            while len(self.submitted) < count:
                self.grew.clear()
                await self.grew.wait()


class Bench:
    """A dispatcher on a recording queue, and the replies that a node would send."""

    def __init__(self, *, requests_max: int = 10, bytes_max: int = 100_000) -> None:
        self.queue = RecordingQueue()
        self.dispatcher = Dispatcher(pending_requests_max=requests_max, pending_bytes_max=bytes_max)
        self.dispatcher.attach(self.queue)

    def start(
        self, jobs: Sequence[Job], *, gone: Callable[[], Awaitable[None]] | None = None
    ) -> "asyncio.Task[list[Result]]":
        return asyncio.create_task(self.dispatcher.run(jobs, gone=gone))

    def reply(self, job_id: str, *events: Event, attempt: int = 1, seq: int = 0) -> None:
        replies = [Reply(job_id, attempt, number, event) for number, event in enumerate(events, seq)]
        self.dispatcher.on_replies(encode_replies(replies))

    def assert_nothing_is_left(self) -> None:
        """After every outcome: no entry, no byte, no request, no task is still counted."""
        dispatcher = self.dispatcher
        assert (dispatcher._pending, dispatcher._bytes, dispatcher._requests) == ({}, 0, 0)
        assert dispatcher.pending_requests == 0
        assert dispatcher._resubmission is None or dispatcher._resubmission.done()


@pytest.fixture
async def bench() -> Bench:
    return Bench()


def job_of(job_id: str, inputs: int = 1, *, width: int | None = None, in_s: float = 60.0) -> Job:
    task = Embed(inputs=("text",) * inputs, width=width)
    return Job(id=job_id, model="m", task=task, reply_to="replies.here", deadline_s=time.time() + in_s)


def rows_of(*firsts: float, width: int = WIDTH) -> Rows:
    return Rows(np.array([[first] * width for first in firsts], dtype="<f4").tobytes(), width)


def firsts_of(results: Sequence[Result]) -> list[float]:
    """The first number of every vector, in order."""
    parts = [part for result in results for part in result.parts if isinstance(part, Rows)]
    rows = [np.frombuffer(part.data, dtype="<f4").reshape(-1, part.width) for part in parts]
    return [float(row[0]) for part in rows for row in part]


@contextmanager
def counted(reason: str, count: int) -> Iterator[None]:
    def stale() -> float:
        tally.flush()
        return REGISTRY.get_sample_value("appliance_stale_replies_total", {"reason": reason}) or 0.0

    before = stale()
    yield
    assert stale() - before == count


async def test_chunks_answered_out_of_order_come_back_in_order(bench: Bench) -> None:
    call = bench.start([job_of("a", 2), job_of("b"), job_of("c")])
    await bench.queue.holds(3)

    bench.reply("c", rows_of(4.0), Done(Usage(40)))
    bench.reply("a", rows_of(1.0), attempt=1)
    bench.reply("b", rows_of(3.0), Done(Usage(30), (2,)))
    bench.reply("a", rows_of(2.0), Done(Usage(10)), seq=1)

    results = await call
    assert firsts_of(results) == [1.0, 2.0, 3.0, 4.0]
    assert [result.usage.input_tokens for result in results] == [10, 30, 40]
    assert [result.done.truncated for result in results] == [(), (2,), ()]
    assert bench.queue.cancelled == []
    bench.assert_nothing_is_left()


async def test_a_beat_says_that_the_model_is_at_work_and_is_no_part_of_an_answer(bench: Bench) -> None:
    alive: list[str] = []
    bench.dispatcher.on_alive(alive.append, elsewhere=lambda model: None)
    job = job_of("a")
    call = bench.start([job])
    await bench.queue.holds(1)

    bench.reply("a", Beat())
    bench.reply("a", rows_of(1.0), Done(Usage(1)), seq=1)

    assert firsts_of(await call) == [1.0]
    assert alive == [job.model]


async def test_a_beat_of_no_job_is_of_a_model_that_answers_another_gateway(bench: Bench) -> None:
    here: list[str] = []
    elsewhere: list[str] = []
    bench.dispatcher.on_alive(here.append, elsewhere=elsewhere.append)

    with counted("unknown job", 0):
        bench.reply("", Beat("m"), Beat("n"))

    assert (here, elsewhere) == ([], ["m", "n"])


async def test_one_message_may_answer_several_calls(bench: Bench) -> None:
    calls = [bench.start([job_of(job_id)]) for job_id in ("a", "b")]
    await bench.queue.holds(2)

    replies = [
        Reply("a", 1, 0, rows_of(1.0)),
        Reply("b", 1, 0, rows_of(2.0)),
        Reply("a", 1, 1, Done()),
        Reply("b", 1, 1, Done()),
    ]
    bench.dispatcher.on_replies(encode_replies(replies))

    assert [firsts_of(await call) for call in calls] == [[1.0], [2.0]]
    bench.assert_nothing_is_left()


async def test_a_later_attempt_replaces_what_an_earlier_one_sent(bench: Bench) -> None:
    call = bench.start([job_of("a", 2)])
    await bench.queue.holds(1)

    bench.reply("a", rows_of(1.0), attempt=1)
    bench.reply("a", rows_of(8.0), attempt=2)
    with counted("old attempt", 2):
        bench.reply("a", rows_of(2.0), Done(), attempt=1, seq=1)
    assert not call.done()
    bench.reply("a", rows_of(9.0), Done(), attempt=2, seq=1)

    assert firsts_of(await call) == [8.0, 9.0]


async def test_the_first_done_settles(bench: Bench) -> None:
    call = bench.start([job_of("a"), job_of("b")])
    await bench.queue.holds(2)

    bench.reply("a", rows_of(1.0), Done())
    with counted("unknown job", 2):
        bench.reply("a", rows_of(5.0), Done(), attempt=2)
    bench.reply("b", rows_of(2.0), Done())

    assert firsts_of(await call) == [1.0, 2.0]
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("seq", [1, 7])
async def test_a_hole_at_the_start_of_an_attempt_is_a_failure(bench: Bench, seq: int) -> None:
    call = bench.start([job_of("a")])
    await bench.queue.holds(1)

    bench.reply("a", Done(), seq=seq)

    with pytest.raises(EngineFailed, match="lost on its way"):
        await call
    assert bench.queue.cancelled == ["a"]
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("seq", [0, 2])
async def test_a_repeated_or_skipped_part_is_a_failure(bench: Bench, seq: int) -> None:
    call = bench.start([job_of("a", 2)])
    await bench.queue.holds(1)

    bench.reply("a", rows_of(1.0))
    bench.reply("a", rows_of(2.0), Done(), seq=seq)

    with pytest.raises(EngineFailed):
        await call
    bench.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("parts", "asked"),
    [
        ([], None),
        ([rows_of(1.0)], None),
        ([rows_of(1.0, 2.0, 3.0)], None),
        ([Rows(b"", 2)], None),
        ([Rows(b"\0" * 16, 0)], None),
        ([Rows(b"\0" * 16, -2)], None),
        ([Rows(b"\0" * 15, 2)], None),
        ([Rows(b"\0" * 4, 2), Rows(b"\0" * 12, 2)], None),
        ([rows_of(1.0, 2.0)], 3),
        ([rows_of(1.0, width=4), Rows(b"", 2)], None),  # of two inputs' size, were the last width true of all
    ],
)
async def test_misshapen_vectors_are_never_an_answer(bench: Bench, parts: list[Rows], asked: int | None) -> None:
    call = bench.start([job_of("a", 2, width=asked)])
    await bench.queue.holds(1)

    bench.reply("a", *parts, Done())

    with pytest.raises(BadVector):
        await call
    bench.assert_nothing_is_left()


async def test_a_failure_is_the_nodes_own_error(bench: Bench) -> None:
    call = bench.start([job_of("a"), job_of("b")])
    await bench.queue.holds(2)

    bench.reply("b", Failed.of(InvalidRequest("too long", param="input[1]")))

    with pytest.raises(InvalidRequest, match="too long") as caught:
        await call
    assert caught.value.param == "input[1]"
    assert bench.queue.cancelled == ["a"]  # not the one that is settled
    bench.assert_nothing_is_left()


async def test_the_first_failure_is_told(bench: Bench) -> None:
    call = bench.start([job_of("a"), job_of("b")])
    await bench.queue.holds(2)

    bench.reply("a", Failed.of(EngineFailed("first")))
    bench.reply("b", Failed.of(InvalidRequest("second")))

    with pytest.raises(EngineFailed, match="first"):
        await call
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("in_s", [-1.0, 0.0, 0.01])
async def test_a_late_answer_is_not_waited_for(bench: Bench, in_s: float) -> None:
    with pytest.raises(DeadlinePassed):
        await bench.dispatcher.run([job_of("a", in_s=in_s)])

    assert bench.queue.cancelled == ["a"]
    with counted("unknown job", 2):
        bench.reply("a", rows_of(1.0), Done())
    bench.assert_nothing_is_left()


async def test_a_late_answer_is_told_to_a_client_that_stays(bench: Bench) -> None:
    async def gone() -> None:
        await asyncio.Event().wait()

    with pytest.raises(DeadlinePassed):
        await bench.dispatcher.run([job_of("a", in_s=0.01)], gone=gone)
    bench.assert_nothing_is_left()


async def test_a_client_that_leaves_cancels_its_unsettled_jobs(bench: Bench) -> None:
    leaving = asyncio.Event()

    async def gone() -> None:
        await leaving.wait()

    call = bench.start([job_of("a"), job_of("b")], gone=gone)
    await bench.queue.holds(2)
    bench.reply("a", rows_of(1.0), Done())
    leaving.set()

    with pytest.raises(ClientGone):
        await call
    assert bench.queue.cancelled == ["b"]
    bench.assert_nothing_is_left()


async def test_a_client_that_stays_is_no_longer_watched_once_answered(bench: Bench) -> None:
    watched: list[str] = []

    async def gone() -> None:
        watched.append("begun")
        try:
            await asyncio.Event().wait()
        finally:
            watched.append("ended")

    call = bench.start([job_of("a")], gone=gone)
    await bench.queue.holds(1)
    await until(lambda: watched == ["begun"])
    bench.reply("a", rows_of(1.0), Done())

    assert firsts_of(await call) == [1.0]
    assert watched == ["begun", "ended"]


async def test_a_client_answered_at_once_is_never_watched(bench: Bench) -> None:
    watched: list[str] = []

    async def gone() -> None:
        watched.append("begun")

    call = bench.start([job_of("a")], gone=gone)
    await bench.queue.holds(1)
    bench.reply("a", rows_of(1.0), Done())

    assert firsts_of(await call) == [1.0]
    assert watched == []


async def test_a_cancelled_request_cancels_its_jobs(bench: Bench) -> None:
    call = bench.start([job_of("a")])
    await bench.queue.holds(1)
    call.cancel()

    with pytest.raises(asyncio.CancelledError):
        await call
    assert bench.queue.cancelled == ["a"]
    bench.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("payload_bytes_max", "pending_bytes_max", "error", "encoded_max"),
    [(1_000, 10**9, BodyTooLarge, 1), (10**9, 25_000, Overloaded, 3)],
)
async def test_no_more_is_encoded_than_is_taken(
    monkeypatch: pytest.MonkeyPatch,
    payload_bytes_max: int,
    pending_bytes_max: int,
    error: type[ApplianceError],
    encoded_max: int,
) -> None:
    """Each choice of a text has all of its prompt."""
    queue = RecordingQueue()
    queue.payload_bytes_max = payload_bytes_max
    dispatcher = Dispatcher(pending_requests_max=9, pending_bytes_max=pending_bytes_max)
    dispatcher.attach(queue)
    encoded: list[Job] = []

    def encode(job: Job) -> bytes:
        encoded.append(job)
        return bytes(10_000)

    monkeypatch.setattr(dispatch, "encode_job", encode)

    with pytest.raises(error):
        await dispatcher.run([job_of(f"choice {number}") for number in range(16)])

    assert len(encoded) <= encoded_max
    assert not queue.submitted


async def test_requests_are_bounded() -> None:
    bench = Bench(requests_max=1)
    first = bench.start([job_of("a")])
    await bench.queue.holds(1)

    with pytest.raises(Overloaded, match="1 requests") as caught:
        await bench.dispatcher.run([job_of("b")])

    assert caught.value.retry_after_s is not None
    assert len(bench.queue.submitted) == 1
    bench.reply("a", rows_of(1.0), Done())
    await first
    second = bench.start([job_of("b")])
    await bench.queue.holds(2)
    bench.reply("b", rows_of(2.0), Done())
    assert firsts_of(await second) == [2.0]
    bench.assert_nothing_is_left()


async def test_bytes_are_bounded() -> None:
    bench = Bench(bytes_max=500)

    with pytest.raises(Overloaded):
        await bench.dispatcher.run([job_of("a", 100)])

    assert bench.queue.submitted == []
    bench.assert_nothing_is_left()


async def test_a_queue_out_of_reach_is_told_at_once(bench: Bench) -> None:
    bench.queue.is_connected = False

    with pytest.raises(QueueUnavailable) as caught:
        await bench.dispatcher.run([job_of("a")])

    assert caught.value.retry_after_s == 2
    bench.assert_nothing_is_left()


async def test_a_refusal_at_once_is_the_answer(bench: Bench) -> None:
    bench.queue.refusal = Overloaded("full")

    with pytest.raises(Overloaded, match="full"):
        await bench.dispatcher.run([job_of("a")])
    bench.assert_nothing_is_left()


async def test_a_refusal_later_is_the_answer_and_says_when_to_return(bench: Bench) -> None:
    call = bench.start([job_of("a"), job_of("b")])
    await bench.queue.holds(2)

    bench.dispatcher.on_refused("nobody's", Overloaded("full"))
    bench.dispatcher.on_refused("b", Overloaded("full"))

    with pytest.raises(Overloaded, match="full") as caught:
        await call
    assert caught.value.retry_after_s is not None
    assert "a" in bench.queue.cancelled
    bench.assert_nothing_is_left()


async def test_a_restored_queue_is_asked_again_and_that_attempt_outranks(bench: Bench) -> None:
    call = bench.start([job_of("a", 2), job_of("b")])
    await bench.queue.holds(2)
    bench.reply("b", rows_of(3.0), Done())
    bench.reply("a", rows_of(1.0), attempt=19)

    bench.dispatcher.on_restored()
    await bench.queue.holds(3)

    message_id, job = bench.queue.submitted[2]
    assert (job.id, job.attempt_base) == ("a", SUBMISSION_STEP)
    assert message_id not in {"a", "b"}
    bench.reply("a", rows_of(8.0, 9.0), attempt=SUBMISSION_STEP + 1)
    with counted("old attempt", 2):
        bench.reply("a", rows_of(2.0), Done(), attempt=19, seq=1)
    bench.reply("a", Done(), attempt=SUBMISSION_STEP + 1, seq=1)
    assert firsts_of(await call) == [8.0, 9.0, 3.0]
    bench.assert_nothing_is_left()


async def test_each_restoration_outranks_the_one_before(bench: Bench) -> None:
    call = bench.start([job_of("a")])
    await bench.queue.holds(1)
    for count in (2, 3):
        bench.dispatcher.on_restored()
        await bench.queue.holds(count)

    assert [job.attempt_base for _, job in bench.queue.submitted] == [0, SUBMISSION_STEP, 2 * SUBMISSION_STEP]
    assert len({message_id for message_id, _ in bench.queue.submitted}) == 3
    bench.reply("a", rows_of(1.0), Done(), attempt=1)  # the first was not lost after all
    assert firsts_of(await call) == [1.0]


async def test_a_queue_lost_again_while_asked_again_fails_nobody(bench: Bench) -> None:
    call = bench.start([job_of("a")])
    await bench.queue.holds(1)

    bench.queue.refusal = QueueUnavailable("lost again")
    bench.dispatcher.on_restored()
    assert bench.dispatcher._resubmission is not None
    await bench.dispatcher._resubmission
    assert not call.done()
    bench.queue.refusal = None
    bench.dispatcher.on_restored()
    await bench.queue.holds(2)

    bench.reply("a", rows_of(1.0), Done(), attempt=bench.queue.submitted[1][1].attempt_base + 1)
    assert firsts_of(await call) == [1.0]
    bench.assert_nothing_is_left()


async def test_what_is_asked_again_waits_for_room(bench: Bench) -> None:
    call = bench.start([job_of("a")])
    await bench.queue.holds(1)
    bench.queue.refusal = Overloaded("full")
    bench.dispatcher.on_restored()
    await until(lambda: bench.queue.refusals > 0)

    bench.queue.refusal = None
    await bench.queue.holds(2)

    bench.reply("a", rows_of(1.0), Done(), attempt=bench.queue.submitted[1][1].attempt_base + 1)
    await call
    bench.assert_nothing_is_left()


async def test_closing_ends_what_is_being_asked_again(bench: Bench) -> None:
    call = bench.start([job_of("a")])
    await bench.queue.holds(1)
    bench.dispatcher.on_restored()

    await bench.dispatcher.close()

    assert bench.dispatcher._resubmission is not None
    assert bench.dispatcher._resubmission.done()
    bench.reply("a", rows_of(1.0), Done())
    await call


@pytest.mark.parametrize("payload", [b"", b"garbage", b"\x91\x80", b"\xc1", encode_replies([])[:-1]])
async def test_garbage_is_counted_and_harms_nobody(bench: Bench, payload: bytes) -> None:
    call = bench.start([job_of("a")])
    await bench.queue.holds(1)

    with counted("undecodable", 1):
        bench.dispatcher.on_replies(payload)

    bench.reply("a", rows_of(1.0), Done())
    assert firsts_of(await call) == [1.0]


async def test_replies_for_nobody_are_counted(bench: Bench) -> None:
    with counted("unknown job", 2):
        bench.reply("nobody's", rows_of(1.0), Done())
    bench.assert_nothing_is_left()


async def test_a_canary_is_no_waiting_request_and_its_late_answer_not_stale(bench: Bench) -> None:
    def waiting() -> float:
        tally.flush()
        return REGISTRY.get_sample_value("appliance_pending_requests") or 0.0

    nobody = waiting()
    canary = bench.start([job_of(f"{CANARY_PREFIX}a")])
    await bench.queue.holds(1)
    assert waiting() == nobody
    call = bench.start([job_of("a")])
    await bench.queue.holds(2)
    assert waiting() == nobody + 1

    for job_id in ("a", f"{CANARY_PREFIX}a"):
        bench.reply(job_id, rows_of(1.0), Done())
    await asyncio.gather(call, canary)

    assert waiting() == nobody
    with counted("unknown job", 0):
        bench.reply(f"{CANARY_PREFIX}a", rows_of(1.0), Done())
    bench.assert_nothing_is_left()
