"""`Link`: a connection to NATS that outlives its sockets. What a connection can do is said here; jetstream.py has it.

A connection that breaks is not repaired: a new one is dialled and prepared from scratch (streams, consumers,
subscriptions), so that there is one path for the first connection and for every later one.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Protocol

import msgspec

from appliance.errors import ApplianceError, QueueUnavailable, StartupError
from appliance.queue.frames import Message
from appliance.queue.streams import (
    NAME_IN_USE,
    NO_ROOM,
    NOT_FOUND,
    ApiError,
    StreamConfig,
    decode_answer,
    stream_subject,
)

RETRY_WAIT_MIN_S = 0.1
RETRY_WAIT_MAX_S = 2.0
SETTLED_AFTER_S = 5.0  # a connection that breaks sooner counts as one more failed attempt

_log = logging.getLogger(__name__)


Listener = Callable[[Message], None]


class Connection(Protocol):
    """One live connection. Every method but `close` raises `QueueUnavailable` once the connection is lost."""

    @property
    def lost(self) -> asyncio.Event:
        """Set for good when the connection has ended."""

    @property
    def message_bytes_max(self) -> int:
        """Payload and headers of one message, as the server said."""

    async def listen(self, subject: str, listener: Listener) -> int:
        """Subscribe, and return the subscription's number. `listener` runs on the event loop and does no I/O."""

    async def hang_up(self, subscription: int) -> None:
        """Ask the server to send no more; what is on its way still reaches the listener."""

    def forget(self, subscription: int) -> None:
        """Drop the listener."""

    async def send(self, subject: str, payload: bytes, *, reply: str = "", headers: bytes = b"") -> None:
        """Publish; returns when the message is buffered, which is bounded."""

    async def call(self, subject: str, payload: bytes, *, headers: bytes = b"") -> bytes:
        """Publish and wait for the one answer, for a bounded time."""

    async def close(self) -> None:
        """Send what is buffered, if possible, and end. May be called twice."""


class Dial(Protocol):
    """How a link gets its connections."""

    async def __call__(self, *, timeout_s: float, retry_wait_s: float) -> Connection:
        """Connect. Raises `QueueUnavailable` for what may pass, `StartupError` for what will not (wrong password)."""


class Link:
    """Keeps one connection alive between `open` and `close`."""

    def __init__(
        self, dial: Dial, *, prepare: Callable[[Connection], Awaitable[None]], restored: Callable[[], None]
    ) -> None:
        """`prepare` makes a fresh connection usable; `restored` is told after each loss that it is usable again."""
        self._dial = dial
        self._prepare = prepare
        self._restored = restored
        self._connection: Connection | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def is_up(self) -> bool:
        """A prepared connection is there."""
        return self._connection is not None and not self._connection.lost.is_set()

    @property
    def connection(self) -> Connection:
        """The live connection. Raises `QueueUnavailable` while there is none."""
        if self._connection is None or self._connection.lost.is_set():
            raise QueueUnavailable("there is no connection to NATS at present; retry later")
        return self._connection

    @property
    def message_bytes_max(self) -> int:
        """As the server last said; known once the link has been opened."""
        assert self._connection is not None, "the queue is used before it is entered"
        return self._connection.message_bytes_max

    async def open(self, *, timeout_s: float) -> None:
        """Connect for the first time. Raises `StartupError` when that does not succeed in time."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        while self._connection is None:
            left_s = deadline_s - loop.time()
            try:
                self._connection = await self._establish(timeout_s=max(left_s, RETRY_WAIT_MIN_S), attempt=0)
            except QueueUnavailable as error:
                if left_s <= RETRY_WAIT_MIN_S:
                    raise StartupError(f"{error.message}; waited {timeout_s:g} s (nats.connect_timeout_s)") from error
                await asyncio.sleep(RETRY_WAIT_MIN_S)
        self._keeper = own(self._keep(self._connection, timeout_s), name="nats link")

    async def close(self) -> None:
        """Stop keeping the connection, and end it."""
        try:
            if self._keeper is not None:
                await stop(self._keeper)
        finally:
            if self._connection is not None:
                await self._connection.close()

    async def _keep(self, connection: Connection, timeout_s: float) -> None:
        attempt = 0
        loop = asyncio.get_running_loop()
        while True:
            born_s = loop.time()
            await connection.lost.wait()
            attempt = 0 if loop.time() - born_s > SETTLED_AFTER_S else attempt + 1
            _log.warning("the connection to NATS is lost; connecting again")
            await connection.close()
            connection, attempt = await self._reconnect(timeout_s, attempt)
            self._connection = connection
            _log.warning("the connection to NATS is restored")
            self._restored()

    async def _reconnect(self, timeout_s: float, attempt: int) -> tuple[Connection, int]:
        """Try for ever, with bounded and jittered waits; NATS may be away for any time."""
        while True:
            if attempt > 0:
                await asyncio.sleep(retry_wait_s(attempt))
            try:
                return await self._establish(timeout_s=timeout_s, attempt=attempt), attempt
            except ApplianceError as error:
                attempt += 1
                _log.warning("NATS is still away: %s", error.message)

    async def _establish(self, *, timeout_s: float, attempt: int) -> Connection:
        connection = await self._dial(timeout_s=timeout_s, retry_wait_s=retry_wait_s(attempt))
        try:
            await self._prepare(connection)
        except BaseException:
            await connection.close()
            raise
        return connection


def retry_wait_s(attempt: int) -> float:
    """A jittered wait that doubles with each attempt, up to a limit."""
    wait_s = min(RETRY_WAIT_MAX_S, RETRY_WAIT_MIN_S * float(2 ** min(attempt, 10)))
    return wait_s * random.uniform(0.5, 1.5)  # noqa: S311 - spreads load, hides nothing


def own(work: Coroutine[object, object, None], *, name: str) -> asyncio.Task[None]:
    """Start a task that its owner will `stop`. Should it die before, of a bug, the event loop says so at once."""

    def tell(task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            context = {"message": f"the task {name!r} died", "exception": error, "task": task}
            task.get_loop().call_exception_handler(context)

    task = asyncio.get_running_loop().create_task(work, name=name)
    task.add_done_callback(tell)
    return task


async def stop(task: asyncio.Task[None]) -> None:
    """Cancel a task of ours and wait for its end; raises what it died of, if it had died."""
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


async def ensure_streams(connection: Connection, configs: tuple[StreamConfig, ...]) -> None:
    """Create or update every stream; creators may race.

    Raises `StartupError` for a configuration that the server refuses, `QueueUnavailable` when it cannot say.
    """
    for config in configs:
        error = await _ensure_stream(connection, config)
        if error is not None:
            raise _stream_refused(config, error)


async def _ensure_stream(connection: Connection, config: StreamConfig) -> ApiError | None:
    """Create or update one stream; what the server says against it.

    The server finds no room for the second of two equal creations, since it counts the limits twice before it looks
    whether the stream is there: then only an update tells.
    """
    body = msgspec.json.encode(config)
    error = decode_answer(await connection.call(stream_subject("CREATE", config.name), body)).error
    if error is None or error.err_code not in {NAME_IN_USE, *NO_ROOM}:
        return error
    refused = decode_answer(await connection.call(stream_subject("UPDATE", config.name), body)).error
    return error if refused is not None and refused.err_code == NOT_FOUND else refused


def _stream_refused(config: StreamConfig, error: ApiError) -> ApplianceError:
    what = f"{config.name} ({config.storage}, {config.max_bytes} B, replicas {config.num_replicas})"
    message = f"NATS refuses the stream {what}: {error.description} ({error.err_code})"
    if error.code == 503:
        return QueueUnavailable(message)  # JetStream is starting, or electing a leader
    return StartupError(
        f"{message}; change the queue settings, the server's JetStream limits, or remove the stream that is in the way"
    )
