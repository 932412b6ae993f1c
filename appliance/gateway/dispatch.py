"""From a request's jobs to its results: the table of pending jobs, and what every reply does to it.

One `Call` is one client request; it waits for all of its jobs. `on_replies` runs on the event loop for every message
from the nodes and does no I/O. A job is settled by its first `Done` or `Failed`; replies of an older attempt, of a
settled job or of nobody's are counted and dropped, and a hole in an attempt's sequence is a failure, never an answer.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager

import msgspec

from appliance import telemetry
from appliance.errors import (
    ApplianceError,
    BadVector,
    EngineFailed,
    Overloaded,
    QueueUnavailable,
)
from appliance.gateway import shapes
from appliance.gateway.drain import DrainRate
from appliance.gateway.pending_calls import WATCH_AFTER_S, Call, Piece, Result, StreamCall, Watch, WholeCall
from appliance.jobs import (
    Beat,
    Delta,
    Done,
    Failed,
    Job,
    Part,
    Reply,
    decode_replies,
    encode_job,
    is_canary,
)
from appliance.queue.base import GatewayListener, GatewayQueue, check_size

RESUBMISSION_PAUSE_S = 0.05
STREAM_SILENCE_S = 10.0
SUBMISSION_STEP = 1000  # above any number of deliveries, so that a resubmitted job's attempts outrank all before it


class _Pending:
    """One job in flight and what has come of its newest attempt."""

    __slots__ = ("attempt", "call", "heard_s", "job", "next_seq", "parts", "position")

    def __init__(self, job: Job, call: Call, position: int) -> None:
        self.job = job
        self.call = call
        self.position = position
        self.heard_s = 0.0  # of a streamed job: when its node last said something; 0 before it begins
        self.start_attempt(0)

    @property
    def is_begun(self) -> bool:
        """Whether its client may have seen a part: then nothing can be done again."""
        return self.heard_s > 0.0

    def start_attempt(self, attempt: int) -> None:
        self.attempt = attempt
        self.next_seq = 0
        self.parts: list[Part] = []


class Dispatcher(GatewayListener):
    """Submits jobs and hands back their results; bounded in requests and in bytes."""

    def __init__(self, *, pending_requests_max: int, pending_bytes_max: int) -> None:
        self._requests_max = pending_requests_max
        self._bytes_max = pending_bytes_max
        self._queue: GatewayQueue | None = None
        self._pending: dict[str, _Pending] = {}
        self._requests = 0
        self._bytes = 0
        self._drain = DrainRate()
        self._resubmission: asyncio.Task[None] | None = None
        self._on_alive: Callable[[str], None] = lambda model: None
        self._on_alive_elsewhere: Callable[[str], None] = lambda model: None

    def attach(self, queue: GatewayQueue) -> None:
        """The queue listens to this dispatcher, so it is built after it."""
        self._queue = queue

    def on_alive(self, listener: Callable[[str], None], *, elsewhere: Callable[[str], None]) -> None:
        """`listener` hears of models that are at work for us, though nothing of theirs is complete yet.

        `elsewhere` hears of those that answer any gateway.
        """
        self._on_alive = listener
        self._on_alive_elsewhere = elsewhere

    @property
    def reply_to(self) -> str:
        """For `Job.reply_to`."""
        return self._attached.reply_to

    @property
    def payload_bytes_max(self) -> int:
        """The largest job the queue takes."""
        return self._attached.payload_bytes_max

    @property
    def pending_requests(self) -> int:
        """Requests that wait for an answer."""
        return self._requests

    async def run(self, jobs: Sequence[Job], *, gone: Callable[[], Awaitable[None]] | None = None) -> list[Result]:
        """Submit a request's jobs and return their results in order, or raise the first error.

        `gone` returns when the client has left; the jobs are then cancelled and ClientGone is raised. Every way out
        but success cancels what is still unsettled. Raises Overloaded when full, DeadlinePassed when late.
        """
        call = WholeCall([job.id for job in jobs])
        async with self._submitted(call, jobs, gone):
            await call.done
        return [result for result in call.results if result is not None]

    @asynccontextmanager
    async def stream(
        self, jobs: Sequence[Job], *, gone: Callable[[], Awaitable[None]] | None = None
    ) -> AsyncIterator[AsyncIterator[Piece | None]]:
        """Submit a request's jobs and give what comes of them as it comes; see `StreamCall.pieces`.

        Otherwise like `run`. A job that has begun is not done again: it goes on, or the call fails. So it does when a
        job that has begun is not heard of for `STREAM_SILENCE_S`: its node says something every second.
        """
        call = StreamCall([job.id for job in jobs])
        async with self._submitted(call, jobs, gone):
            listening = asyncio.create_task(self._listen(call))
            try:
                async with aclosing(call.pieces()) as pieces:
                    yield pieces
            finally:
                if not call.has_failed:  # else it ends by itself, once the nodes are told
                    listening.cancel()
                await asyncio.wait({listening})

    @asynccontextmanager
    async def _submitted(
        self, call: Call, jobs: Sequence[Job], gone: Callable[[], Awaitable[None]] | None
    ) -> AsyncIterator[None]:
        """The call's jobs are with the queue; it fails when its deadline passes or its client leaves."""
        payloads = self._encoded(jobs)
        size = sum(map(len, payloads))
        self._admit(size)
        is_counted = not is_canary(jobs[0].id)
        telemetry.PENDING_REQUESTS.inc(is_counted)
        try:
            for position, (job, payload) in enumerate(zip(jobs, payloads, strict=True)):
                self._pending[job.id] = _Pending(job, call, position)
                await self._submit(job, payload, message_id=job.id)
            left_s = jobs[0].deadline_s - time.time()
            watch = Watch(call, gone, left_s=left_s, after_s=0.0 if isinstance(call, StreamCall) else WATCH_AFTER_S)
            try:
                yield
            finally:
                await watch.end()
        finally:
            self._requests -= 1
            self._bytes -= size
            telemetry.PENDING_REQUESTS.inc(-is_counted)
            await self._forget(call)
            call.close()

    async def _listen(self, call: StreamCall) -> None:
        """Fail the call when one of its jobs falls silent; stop its jobs when it fails.

        Its reader may be at a send to a slow client, and come to know of the failure much later.
        """
        while not await call.failed(within_s=STREAM_SILENCE_S / 4):
            oldest_s = time.monotonic() - STREAM_SILENCE_S
            begun = [found for job_id in call.job_ids if (found := self._pending.get(job_id)) and found.is_begun]
            if any(pending.heard_s < oldest_s for pending in begun):
                call.fail(EngineFailed("the text broke off: its node fell silent; try again"))
        await self._forget(call)

    def on_replies(self, payload: bytes) -> None:
        """Take one message from a node."""
        try:
            replies = decode_replies(payload)
        except msgspec.DecodeError:
            telemetry.STALE_REPLIES.labels("undecodable").inc()
            return
        for reply in replies:
            if isinstance(reply.event, Beat) and reply.event.model:
                self._on_alive_elsewhere(reply.event.model)
                continue
            pending = self._pending.get(reply.job_id)
            if pending is None and is_canary(reply.job_id):
                continue  # it came too late, as canaries do that wait behind much work
            if pending is None or reply.attempt < pending.attempt:
                telemetry.STALE_REPLIES.labels("unknown job" if pending is None else "old attempt").inc()
            else:
                self._take(pending, reply)

    def on_refused(self, job_id: str, error: ApplianceError) -> None:
        """The queue did not take the job."""
        pending = self._pending.get(job_id)
        if pending is None:
            return
        if isinstance(error, Overloaded):
            error.retry_after_s = error.retry_after_s or self._seconds_to_drain()
        if type(error) is Overloaded and not pending.job.attempt_base:
            del self._pending[job_id]  # it was never stored: no node needs to hear that nobody waits for it
        pending.call.fail(error)

    def on_restored(self) -> None:
        """Ask again for every unsettled job: the queue may have lost it, or we its reply.

        A job that was not lost is then computed twice and answered once; losing it would cost its whole deadline.
        """
        if self._resubmission is not None:
            self._resubmission.cancel()  # what it has asked for is lost again
        unsettled = [pending for pending in self._pending.values() if not pending.is_begun]
        self._resubmission = asyncio.get_running_loop().create_task(self._resubmit(unsettled))

    def give_up(self) -> None:
        """The gateway stops: whoever still waits is told so."""
        for call in {pending.call for pending in self._pending.values()}:
            call.fail(Overloaded("the server is stopping and cannot finish this; try again", retry_after_s=1.0))

    async def close(self) -> None:
        """End a resubmission under way."""
        if self._resubmission is not None:
            self._resubmission.cancel()
            await asyncio.wait({self._resubmission})

    @property
    def _attached(self) -> GatewayQueue:
        assert self._queue is not None, "the dispatcher is used before a queue is attached"
        return self._queue

    def _encoded(self, jobs: Sequence[Job]) -> list[bytes]:
        """The payloads; where they are not taken no more are made, as each choice of a text has all of its prompt.

        Raises BodyTooLarge, and what `_check_room` does.
        """
        payloads: list[bytes] = []
        size = 0
        for job in jobs:
            self._check_room(size)
            payloads.append(encode_job(job))
            size += len(payloads[-1])
            check_size(payloads[-1], bytes_max=self.payload_bytes_max)
        return payloads

    def _admit(self, size: int) -> None:
        self._check_room(size)
        self._requests += 1
        self._bytes += size

    def _check_room(self, size: int) -> None:
        if self._requests >= self._requests_max or self._bytes + size > self._bytes_max:
            raise Overloaded(
                f"{self._requests} requests of {self._bytes} B wait for an answer and the gateway takes "
                f"{self._requests_max} of {self._bytes_max} B; try again later",
                retry_after_s=self._seconds_to_drain(),
            )
        if not self._attached.is_connected:
            raise QueueUnavailable("the queue is out of reach at present; try again", retry_after_s=2)

    def _seconds_to_drain(self) -> float:
        return self._drain.seconds_to_drain(len(self._pending), now_s=time.monotonic())

    async def _submit(self, job: Job, payload: bytes, *, message_id: str) -> None:
        await self._attached.submit(
            job_id=job.id, message_id=message_id, model=job.model, lane=job.lane, payload=payload
        )

    async def _resubmit(self, unsettled: Sequence[_Pending]) -> None:
        for pending in unsettled:
            while self._pending.get(pending.job.id) is pending and not pending.is_begun:  # its deadline bounds this
                job = msgspec.structs.replace(pending.job, attempt_base=pending.job.attempt_base + SUBMISSION_STEP)
                if isinstance(pending.call, StreamCall):
                    # Its earlier self must not begin now: then the new one would be a second text.
                    pending.start_attempt(job.attempt_base)
                try:
                    await self._submit(job, encode_job(job), message_id=f"{job.id}~{job.attempt_base}")
                except QueueUnavailable:
                    return  # lost again: the next restoration asks again
                except Overloaded:
                    await asyncio.sleep(RESUBMISSION_PAUSE_S)  # all at once is more than the queue takes at once
                except ApplianceError as error:
                    pending.call.fail(error)
                    break
                else:
                    pending.job = job
                    telemetry.RESUBMITTED_JOBS.inc()
                    break

    async def _forget(self, call: Call) -> None:
        """Drop the call's entries; nodes are told of those still unsettled."""
        unsettled = [job_id for job_id in call.job_ids if self._pending.pop(job_id, None) is not None]
        if unsettled:
            await self._attached.cancel(unsettled)

    def _take(self, pending: _Pending, reply: Reply) -> None:
        if reply.attempt > pending.attempt:
            if pending.is_begun:
                pending.call.fail(EngineFailed("the text broke off: another node began it anew; try again"))
                return
            pending.start_attempt(reply.attempt)
        if reply.seq != pending.next_seq:
            if reply.attempt < pending.job.attempt_base:
                return  # a hole in an attempt that is being replaced anyway
            pending.call.fail(EngineFailed("a part of the answer was lost on its way; try again"))
            return
        pending.next_seq += 1
        if isinstance(pending.call, StreamCall):
            pending.heard_s = time.monotonic()
        match reply.event:
            case Done() as done:
                self._settle(pending, done)
            case Failed() as failed:
                self._drain.settled(time.monotonic())
                del self._pending[pending.job.id]  # settled: no node needs to hear that nobody waits for it
                pending.call.fail(failed.error())
            case Beat():
                self._on_alive(pending.job.model)
            case Delta() as delta if isinstance(pending.call, StreamCall):
                pending.call.put(pending.position, delta)
            case part:
                pending.parts.append(part)

    def _settle(self, pending: _Pending, done: Done) -> None:
        fault = shapes.fault(pending.parts, task=pending.job.task)
        if fault:
            pending.call.fail(BadVector(fault))
            return
        self._drain.settled(time.monotonic())
        del self._pending[pending.job.id]
        pending.call.settle(pending.position, tuple(pending.parts), done)
