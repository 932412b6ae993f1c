"""Streams of a request's jobs: as they come, never done twice, never with a hole, bounded, and stopped at once."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import numpy as np
import pytest

from appliance.errors import (
    ApplianceError,
    BadVector,
    ClientGone,
    DeadlinePassed,
    EngineFailed,
    InvalidRequest,
    Overloaded,
)
from appliance.gateway import dispatch, pending_calls
from appliance.gateway.dispatch import SUBMISSION_STEP, Dispatcher
from appliance.gateway.pending_calls import Piece
from appliance.jobs import (
    Beat,
    Delta,
    Done,
    Event,
    Failed,
    Generate,
    Job,
    Lane,
    Reply,
    Rows,
    decode_job,
    encode_replies,
)
from tests.node_parts import until

DONE = Done()


class ListeningQueue:
    """Keeps what it is given."""

    reply_to = "replies.here"
    payload_bytes_max = 1_000_000
    is_connected = True

    def __init__(self) -> None:
        self.submitted: list[Job] = []
        self.cancelled: list[str] = []

    async def submit(self, *, job_id: str, message_id: str, model: str, lane: Lane, payload: bytes) -> None:
        self.submitted.append(decode_job(payload))

    async def cancel(self, job_ids: Sequence[str]) -> None:
        self.cancelled += job_ids


class Stream:
    """A call that is read as far as its reader is told to, and what its nodes send."""

    def __init__(self, *job_ids: str, in_s: float = 60.0, gone: Callable[[], Awaitable[None]] | None = None) -> None:
        self.queue = ListeningQueue()
        self.dispatcher = Dispatcher(pending_requests_max=10, pending_bytes_max=100_000)
        self.dispatcher.attach(self.queue)
        self.seen: list[Piece | None] = []
        self.error: ApplianceError | None = None
        self._jobs = [_job(job_id, in_s) for job_id in job_ids]
        self._gone = gone
        self._may_read = asyncio.Event()
        self._may_read.set()
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Stream":
        self._reading = asyncio.create_task(self._read())
        await until(lambda: len(self.queue.submitted) == len(self._jobs))
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.leave()

    def reply(self, job_id: str, *events: Event, attempt: int = 1, seq: int = 0) -> None:
        replies = [Reply(job_id, attempt, number, event) for number, event in enumerate(events, seq)]
        self.dispatcher.on_replies(encode_replies(replies))

    def pause(self) -> None:
        """The reader is somewhere else: at a send to a slow client."""
        self._may_read.clear()

    def go_on(self) -> None:
        self._may_read.set()

    async def ended(self) -> None:
        """The reader has come to an end or an error; nothing is left behind."""
        assert self._reading is not None
        async with asyncio.timeout(5):
            await asyncio.wait({self._reading})
        dispatcher = self.dispatcher
        assert (dispatcher._pending, dispatcher._bytes, dispatcher._requests) == ({}, 0, 0)

    async def leave(self) -> None:
        """Stop reading, wherever the reader is."""
        assert self._reading is not None
        self._reading.cancel()
        await self.ended()

    @property
    def texts(self) -> list[tuple[int, str]]:
        return [(piece.position, piece.event.text) for piece in self.seen if piece and isinstance(piece.event, Delta)]

    @property
    def done(self) -> list[int]:
        return [piece.position for piece in self.seen if piece and isinstance(piece.event, Done)]

    async def _read(self) -> None:
        try:
            async with self.dispatcher.stream(self._jobs, gone=self._gone) as pieces:
                await self._take(pieces)
        except ApplianceError as error:
            self.error = error

    async def _take(self, pieces: AsyncIterator[Piece | None]) -> None:
        async for piece in pieces:
            self.seen.append(piece)
            await self._may_read.wait()


def _job(job_id: str, in_s: float) -> Job:
    task = Generate(prompt="text", is_streamed=True)
    return Job(id=job_id, model="m", task=task, reply_to="replies.here", deadline_s=time.time() + in_s)


async def test_pieces_come_as_they_come_whatever_job_they_are_of() -> None:
    async with Stream("a", "b") as stream:
        stream.reply("b", Beat(), Delta("b1"))
        await until(lambda: stream.texts == [(1, "b1")])  # before the other has begun
        stream.reply("a", Delta("a1"))
        stream.reply("b", Delta("b2"), DONE, seq=2)
        stream.reply("a", Delta("a2"), DONE, seq=1)
        await stream.ended()

    assert stream.error is None
    assert stream.texts == [(1, "b1"), (0, "a1"), (1, "b2"), (0, "a2")]
    assert stream.done == [1, 0]
    assert stream.queue.cancelled == []


async def test_a_text_without_a_part_is_a_text() -> None:
    async with Stream("a") as stream:
        stream.reply("a", Beat(), DONE)
        await stream.ended()

    assert (stream.error, stream.texts, stream.done) == (None, [], [0])


@pytest.mark.parametrize("begun", [[], [Beat()], [Delta("x")]])
async def test_a_refusal_is_the_nodes_own_error_and_stops_the_others(begun: list[Event]) -> None:
    async with Stream("a", "b") as stream:
        stream.reply("a", *begun, Failed.of(InvalidRequest("no", param="tools")))
        await stream.ended()

    assert isinstance(stream.error, InvalidRequest)
    assert stream.error.param == "tools"
    assert len(stream.texts) == sum(isinstance(event, Delta) for event in begun)
    assert stream.queue.cancelled == ["b"]


@pytest.mark.parametrize("seq", [0, 2])
async def test_a_text_with_a_hole_or_a_repetition_is_no_text(seq: int) -> None:
    async with Stream("a") as stream:
        stream.reply("a", Delta("one"))
        stream.reply("a", Delta("three"), DONE, seq=seq)
        await stream.ended()

    assert isinstance(stream.error, EngineFailed)
    assert stream.texts == [(0, "one")]
    assert stream.done == []


async def test_before_it_begins_a_job_may_be_done_by_another_node() -> None:
    async with Stream("a") as stream:
        stream.reply("a", Delta("x"), DONE, attempt=2)
        await stream.ended()

    assert (stream.error, stream.texts) == (None, [(0, "x")])


@pytest.mark.parametrize("begun", [Beat(), Delta("x")])
async def test_once_it_has_begun_another_attempt_is_a_failure(begun: Event) -> None:
    async with Stream("a") as stream:
        stream.reply("a", begun)
        stream.reply("a", Delta("y"), DONE, attempt=2)
        await stream.ended()

    assert isinstance(stream.error, EngineFailed)
    assert (0, "y") not in stream.texts
    assert stream.queue.cancelled == ["a"]


async def test_another_kind_of_answer_is_no_answer() -> None:
    async with Stream("a") as stream:
        stream.reply("a", Rows(np.zeros(2, "<f4").tobytes(), 2), DONE)
        await stream.ended()

    assert isinstance(stream.error, BadVector)


async def test_a_restored_queue_is_asked_again_for_what_has_not_begun_only() -> None:
    async with Stream("a", "b") as stream:
        stream.reply("a", Delta("a1"))
        stream.dispatcher.on_restored()
        await until(lambda: len(stream.queue.submitted) == 3)
        again = stream.queue.submitted[2]
        assert (again.id, again.attempt_base) == ("b", SUBMISSION_STEP)

        stream.reply("b", Delta("its earlier self"))  # is not begun now, or the new one would be a second text
        stream.reply("b", Delta("b1"), DONE, attempt=SUBMISSION_STEP + 1)
        stream.reply("a", DONE, seq=1)
        await stream.ended()

    assert stream.error is None
    assert stream.texts == [(0, "a1"), (1, "b1")]


async def test_a_begun_job_that_falls_silent_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "STREAM_SILENCE_S", 0.02)
    async with Stream("a", "b") as stream:
        stream.reply("a", Delta("a1"))
        await stream.ended()

    assert isinstance(stream.error, EngineFailed)
    assert "fell silent" in stream.error.message
    assert sorted(stream.queue.cancelled) == ["a", "b"]


async def test_a_job_that_has_not_begun_may_wait_for_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "STREAM_SILENCE_S", 0.01)
    async with Stream("a", in_s=0.1) as stream:
        await stream.ended()

    assert isinstance(stream.error, DeadlinePassed)
    assert stream.queue.cancelled == ["a"]


async def test_nothing_for_a_while_is_told_while_beats_keep_it_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "IDLE_S", 0.001)
    async with Stream("a") as stream:
        stream.reply("a", Beat())
        await until(lambda: len(stream.seen) >= 3)
        assert set(stream.seen) == {None}
        stream.reply("a", Delta("late"), DONE, seq=1)
        await stream.ended()

    assert (stream.error, stream.texts) == (None, [(0, "late")])


async def test_a_reader_that_leaves_stops_the_jobs() -> None:
    async with Stream("a", "b") as stream:
        stream.reply("a", Delta("x"), DONE)
        stream.reply("b", Delta("y"))
        await until(lambda: len(stream.texts) == 2)
        await stream.leave()

    assert stream.queue.cancelled == ["b"]


async def test_a_client_that_leaves_stops_the_jobs_also_when_nothing_more_comes() -> None:
    leaving = asyncio.Event()

    async def gone() -> None:
        await leaving.wait()

    async with Stream("a", gone=gone) as stream:
        stream.reply("a", Delta("x"))
        await until(lambda: len(stream.texts) == 1)
        leaving.set()
        await stream.ended()

    assert isinstance(stream.error, ClientGone)
    assert stream.queue.cancelled == ["a"]


async def test_what_a_slow_reader_has_not_taken_is_bounded_and_its_jobs_stop_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pending_calls, "STREAM_BYTES_MAX", 4000)
    async with Stream("a", "b") as stream:
        stream.reply("b", Delta("y"))
        stream.pause()
        stream.reply("a", *[Delta("x" * 100)] * 100)
        await until(lambda: sorted(stream.queue.cancelled) == ["a", "b"])  # while it does not read
        stream.go_on()
        await stream.ended()

    assert isinstance(stream.error, Overloaded)
    assert len(stream.texts) <= 1
    assert sorted(stream.queue.cancelled) == ["a", "b"]  # once


async def test_what_was_taken_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_calls, "STREAM_BYTES_MAX", 4000)
    async with Stream("a") as stream:
        for number in range(100):
            stream.reply("a", Delta("x" * 100), seq=number)
            await until(lambda count=number + 1: len(stream.texts) == count)  # type: ignore[misc]
        stream.reply("a", DONE, seq=100)
        await stream.ended()

    assert (stream.error, len(stream.texts)) == (None, 100)


async def test_a_slow_reader_gets_all_that_came_before_a_failure() -> None:
    async with Stream("a") as stream:
        stream.pause()
        stream.reply("a", Delta("1"), Delta("2"), Failed.of(EngineFailed("gone")))
        stream.go_on()
        await stream.ended()

    assert isinstance(stream.error, EngineFailed)
    assert stream.texts == [(0, "1"), (0, "2")]


async def test_a_gateway_that_stops_tells_all_who_wait() -> None:
    async with Stream("a", "b") as stream:
        whole = asyncio.create_task(stream.dispatcher.run([_job("c", 60.0)]))
        await until(lambda: len(stream.queue.submitted) == 3)
        stream.reply("a", Delta("x"))
        stream.dispatcher.give_up()
        await until(whole.done)
        await stream.ended()

    assert isinstance(stream.error, Overloaded)
    assert stream.texts == [(0, "x")]
    assert isinstance(whole.exception(), Overloaded)
    assert sorted(stream.queue.cancelled) == ["a", "b", "c"]


async def test_a_full_gateway_refuses_before_anything_is_asked() -> None:
    queue = ListeningQueue()
    dispatcher = Dispatcher(pending_requests_max=0, pending_bytes_max=100)
    dispatcher.attach(queue)

    with pytest.raises(Overloaded):
        async with dispatcher.stream([_job("a", 60.0)]):
            pass

    assert queue.submitted == []
