"""One client request on its way: what it waits for, and what ends the waiting."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import NamedTuple

import msgspec

from appliance.errors import ApplianceError, ClientGone, DeadlinePassed, Overloaded
from appliance.jobs import Delta, Done, Part, Usage

WATCH_AFTER_S = 0.25
STREAM_BYTES_MAX = 4 * 1024 * 1024  # of a stream's parts that its client has not taken yet
IDLE_S = 15.0  # of a stream: after it the client is to be shown that its connection lives
PIECE_BYTES = 200  # of a part beside its text


class Result(msgspec.Struct, frozen=True):
    """What one job came to. `parts` are of the kind that answers its task, and complete: see `shapes.fault`."""

    parts: tuple[Part, ...]
    done: Done

    @property
    def usage(self) -> Usage:
        """See `jobs.Done`."""
        return self.done.usage


class Piece(NamedTuple):
    """What comes of one job of a stream."""

    position: int
    event: Delta | Done


class Call(ABC):
    """Waits for its jobs."""

    def __init__(self, job_ids: Sequence[str]) -> None:
        self.job_ids = job_ids

    @abstractmethod
    def settle(self, position: int, parts: tuple[Part, ...], done: Done) -> None:
        """One of its jobs is complete."""

    @abstractmethod
    def fail(self, error: ApplianceError) -> None:
        """It ends with the first error."""

    @abstractmethod
    def close(self) -> None:
        """Nobody waits for it any more."""

    def expire(self) -> None:
        """Its deadline has passed."""
        self.fail(DeadlinePassed("no answer within the request's deadline; send less at once or raise the timeout"))


class WholeCall(Call):
    """Its jobs' results, and the future its endpoint waits on."""

    def __init__(self, job_ids: Sequence[str]) -> None:
        super().__init__(job_ids)
        self.results: list[Result | None] = [None] * len(job_ids)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unsettled = len(job_ids)

    def settle(self, position: int, parts: tuple[Part, ...], done: Done) -> None:
        """See `Call`."""
        self.results[position] = Result(parts, done)
        self._unsettled -= 1
        if self._unsettled == 0 and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: ApplianceError) -> None:
        """See `Call`."""
        if not self.done.done():
            self.done.set_exception(error)

    def close(self) -> None:
        """See `Call`."""
        if self.done.done() and not self.done.cancelled():
            self.done.exception()  # retrieved, also when the client left at the same moment


class StreamCall(Call):
    """What has come and is not taken yet; bounded."""

    def __init__(self, job_ids: Sequence[str]) -> None:
        super().__init__(job_ids)
        self._unsettled = len(job_ids)
        self._waiting: deque[Piece] = deque()
        self._size = 0
        self._error: ApplianceError | None = None
        self._changed = asyncio.Event()
        self._failed = asyncio.Event()

    @property
    def has_failed(self) -> bool:
        """Whether what is still given out ends with an error."""
        return self._error is not None

    async def failed(self, *, within_s: float) -> bool:
        """Whether it has failed, or does so within a time."""
        try:
            async with asyncio.timeout(within_s):
                await self._failed.wait()
        except TimeoutError:
            return self.has_failed
        return True

    def put(self, position: int, delta: Delta) -> None:
        """The next part of a job's text."""
        if self.has_failed:
            return
        self._size += _size_of(delta)
        if self._size > STREAM_BYTES_MAX:
            self._waiting.clear()
            self.fail(
                Overloaded("the client reads more slowly than the text is written; read faster, or do not stream")
            )
            return
        self._waiting.append(Piece(position, delta))
        self._changed.set()

    def settle(self, position: int, parts: tuple[Part, ...], done: Done) -> None:
        """See `Call`."""
        if self.has_failed:
            return
        self._unsettled -= 1
        self._waiting.append(Piece(position, done))
        self._changed.set()

    def fail(self, error: ApplianceError) -> None:
        """See `Call`. What came before the error is still given out."""
        self._error = self._error or error
        self._failed.set()
        self._changed.set()

    def close(self) -> None:
        """See `Call`."""
        self._waiting.clear()

    def expire(self) -> None:
        """See `Call`."""
        self.fail(DeadlinePassed("the text was not complete within its time; ask for fewer tokens"))

    def _is_open(self) -> bool:
        return self._error is None and self._unsettled > 0

    async def pieces(self) -> AsyncGenerator[Piece | None, None]:
        """What comes, in the order in which it comes, until all jobs are done; raises the call's error.

        None is nothing, for `IDLE_S`.
        """
        while True:
            while self._waiting:
                piece = self._waiting.popleft()
                self._size -= _size_of(piece.event)
                yield piece
            if self._error is not None:
                raise self._error
            if self._unsettled == 0:
                return
            self._changed.clear()
            idle = asyncio.get_running_loop().call_later(IDLE_S, self._changed.set)
            try:
                await self._changed.wait()
            finally:
                idle.cancel()
            if not self._waiting and self._is_open():
                yield None


class Watch:
    """Fails a call whose deadline has passed or whose client has left.

    For the client it begins to look only after `after_s`, with the timer that is there for the deadline anyway: most
    calls are answered by then, and a task for each would cost a short call more than all its other waiting.
    """

    __slots__ = ("_call", "_ends_s", "_gone", "_loop", "_task", "_timer")

    def __init__(
        self, call: Call, gone: Callable[[], Awaitable[None]] | None, *, left_s: float, after_s: float = WATCH_AFTER_S
    ) -> None:
        self._call = call
        self._gone = gone
        self._loop = asyncio.get_running_loop()
        self._ends_s = self._loop.time() + left_s
        self._task: asyncio.Task[None] | None = None
        if gone is not None and left_s > after_s:
            self._timer = self._loop.call_later(after_s, self._begin)
        else:
            self._timer = self._loop.call_later(max(0.0, left_s), call.expire)

    async def end(self) -> None:
        """Stop watching."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    def _begin(self) -> None:
        self._timer = self._loop.call_at(self._ends_s, self._call.expire)
        self._task = self._loop.create_task(self._watch())

    async def _watch(self) -> None:
        assert self._gone is not None, "there is a client to watch"
        await self._gone()
        self._call.fail(ClientGone("the client closed the connection before its answer was ready"))


def _size_of(event: Delta | Done) -> int:
    if isinstance(event, Done):
        return 0
    texts = len(event.text) + len(event.reasoning) + sum(len(part.arguments) for part in event.calls)
    return PIECE_BYTES * (1 + sum(1 + len(chosen.top) for chosen in event.logprobs)) + 4 * texts
