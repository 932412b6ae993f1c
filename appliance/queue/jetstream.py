"""The queue on NATS JetStream, and the only module that imports nats.

It speaks the JetStream API by hand over nats-py's core client, because that costs half the CPU of nats-py's own
JetStream layer: one long-lived pull per (model, lane), raw acks, and one inbox for all publish confirmations.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Self

from nats import errors
from nats.aio.client import Client
from nats.protocol.parser import Parser

from appliance.errors import ApplianceError, QueueUnavailable, StartupError
from appliance.jobs import Cancel, Lane, encode_cancel
from appliance.queue import streams
from appliance.queue.base import Delivery, GatewayListener, Pull, check_size
from appliance.queue.credentials import connect_options, shown_url
from appliance.queue.frames import FrameReader, Message, publish_frame
from appliance.queue.headers import HEADER_BYTES_MAX, is_unanswered, message_header
from appliance.queue.link import Connection, Dial, Link, Listener, ensure_streams, own, stop
from appliance.queue.outbox import Outbox, Unconfirmed
from appliance.queue.pull import JetStreamPull
from appliance.queue.subjects import ALL_GATEWAYS, CANCEL_SUBJECT, REPLY_PREFIX, Role, inbox_prefix, job_subject
from appliance.settings import NatsSettings, QueueSettings

CALL_TIMEOUT_S = 3.0
OUTBOUND_BYTES_MAX = 32 * 1024 * 1024  # written by us, not yet taken by the socket
OUTBOUND_WAIT_S = 5.0  # how long a sender waits for room in it
PING_INTERVAL_S = 5.0
PINGS_UNANSWERED_MAX = 2  # a server that is gone without a word is noticed after this many intervals
CLOSE_WAIT_S = 2.0  # to send what is buffered
CLOSE_WAIT_BROKEN_S = 0.1  # after a failed TLS handshake asyncio never reports the socket's end
TEND_INTERVAL_S = 0.25  # between looks at what is unconfirmed, expired or silent
CANCELLED_JOBS_MAX = 1000  # in one message

_log = logging.getLogger(__name__)


class JetStreamGatewayQueue:
    """A gateway's face of the queue: see `base.GatewayQueue`."""

    def __init__(self, nats: NatsSettings, queue: QueueSettings, listener: GatewayListener) -> None:
        self._nats = nats
        self._queue = queue
        self._listener = listener
        name = secrets.token_hex(16)  # not to be guessed: whoever knows it can send answers
        self._reply_to = f"{REPLY_PREFIX}.{name}"
        self._confirmations = f"{inbox_prefix('gateway')}.{name}"
        self._link = Link(_dial_as(nats, "gateway"), prepare=self._prepare, restored=self._on_restored)
        self._outbox = Outbox()
        self._misses_streams = False
        self._tender: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._link.open(timeout_s=self._nats.connect_timeout_s)
        self._tender = own(self._tend(), name="nats confirmations")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tender is not None, "entered before it is left"
        try:
            await stop(self._tender)
        finally:
            await self._link.close()

    @property
    def reply_to(self) -> str:
        """This gateway's reply address, for `Job.reply_to`."""
        return self._reply_to

    @property
    def payload_bytes_max(self) -> int:
        """What the server takes in one message, less the room for headers. Known once the queue is entered."""
        return self._link.message_bytes_max - HEADER_BYTES_MAX

    @property
    def is_connected(self) -> bool:
        """False while NATS is out of reach or its streams are not ready."""
        return self._link.is_up

    async def submit(self, *, job_id: str, message_id: str, model: str, lane: Lane, payload: bytes) -> None:
        """Send one job; a later refusal comes to `GatewayListener.on_refused`.

        Raises `QueueUnavailable` without a connection, `Overloaded` when too much is unconfirmed already, and
        `BodyTooLarge` for a payload over `payload_bytes_max`.
        """
        connection = self._link.connection
        check_size(payload, bytes_max=self.payload_bytes_max)
        subject = job_subject(lane, model)
        now = asyncio.get_running_loop().time()
        token = self._outbox.add(job_id=job_id, message_id=message_id, subject=subject, payload=payload, now=now)
        try:
            await self._publish(connection, token, message_id, subject, payload)
        except BaseException:
            self._outbox.settle(token)
            raise

    async def cancel(self, job_ids: Sequence[str]) -> None:
        """Tell all nodes that nobody waits for these jobs. Best effort: deadlines are the backstop."""
        for first in range(0, len(job_ids), CANCELLED_JOBS_MAX):
            cancel = Cancel(tuple(job_ids[first : first + CANCELLED_JOBS_MAX]))
            try:
                await self._link.connection.send(CANCEL_SUBJECT, encode_cancel(cancel))
            except QueueUnavailable:
                return

    async def _prepare(self, connection: Connection) -> None:
        await connection.listen(f"{self._confirmations}.*", self._on_confirmation)
        for subject in (self._reply_to, ALL_GATEWAYS):
            await connection.listen(subject, lambda message: self._listener.on_replies(message.data))
        await ensure_streams(connection, streams.streams(self._queue))

    def _on_restored(self) -> None:
        self._outbox.clear()  # the listener submits again what is still wanted; both would be twice
        self._listener.on_restored()

    async def _publish(self, connection: Connection, token: str, message_id: str, subject: str, payload: bytes) -> None:
        reply = f"{self._confirmations}.{token}"
        await connection.send(subject, payload, reply=reply, headers=message_header(message_id))

    def _on_confirmation(self, message: Message) -> None:
        if is_unanswered(message.headers):
            self._misses_streams = True  # nobody stores the subject; the job stays unconfirmed and is sent again
            return
        job = self._outbox.settle(message.subject.rpartition(b".")[2].decode())
        error = streams.decode_answer(message.data).error
        if job is not None and error is not None:
            self._listener.on_refused(job.job_id, streams.refusal(error))

    async def _tend(self) -> None:
        """Send again what is not confirmed in time, and refuse it when that does not help."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TEND_INTERVAL_S)
            for job in self._outbox.give_up(now=loop.time()):
                self._listener.on_refused(job.job_id, _not_confirmed(job))
            try:
                await self._resend(self._link.connection, now=loop.time())
            except ApplianceError as error:
                _log.debug("unconfirmed jobs wait: %s", error.message)

    async def _resend(self, connection: Connection, *, now: float) -> None:
        if self._misses_streams:
            await ensure_streams(connection, streams.streams(self._queue))
            self._misses_streams = False
        for token, job in self._outbox.resend(now=now):
            await self._publish(connection, token, job.message_id, job.subject, job.payload)


class JetStreamNodeQueue:
    """A node's face of the queue: see `base.NodeQueue`."""

    def __init__(self, nats: NatsSettings, queue: QueueSettings) -> None:
        self._nats = nats
        self._queue = queue
        self._link = Link(_dial_as(nats, "node"), prepare=self._prepare, restored=lambda: None)
        self._pulls: set[JetStreamPull] = set()
        self._cancelled: list[Callable[[bytes], None]] = []
        self._wake = asyncio.Event()
        self._tender: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._link.open(timeout_s=self._nats.connect_timeout_s)
        self._tender = own(self._tend(), name="nats pulls")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tender is not None, "entered before it is left"
        try:
            await stop(self._tender)
        finally:
            await self._link.close()

    @property
    def payload_bytes_max(self) -> int:
        """What the server takes in one message, less the room for headers. Known once the queue is entered."""
        return self._link.message_bytes_max - HEADER_BYTES_MAX

    def pull(
        self, *, model: str, lane: Lane, on_delivery: Callable[[Delivery], None]
    ) -> AbstractAsyncContextManager[Pull]:
        """Open the pull for one (model, lane). While NATS is out of reach it opens on NATS's return.

        Entering raises `StartupError` when the server refuses the consumer.
        """
        pull = JetStreamPull(
            lane=lane, model=model, settings=self._queue, link=self._link, on_delivery=on_delivery, wake=self._wake.set
        )
        return self._opened(pull)

    @contextlib.asynccontextmanager
    async def _opened(self, pull: JetStreamPull) -> AsyncIterator[Pull]:
        self._pulls.add(pull)  # first, so that a connection that comes up meanwhile opens it
        try:
            with contextlib.suppress(QueueUnavailable):
                await pull.open(self._link.connection)
            yield pull
        finally:
            self._pulls.discard(pull)
            await pull.close()

    async def reply(self, reply_to: str, payload: bytes) -> None:
        """Send one message straight to the gateway, at most once.

        Raises `QueueUnavailable` without a connection and `BodyTooLarge` over `payload_bytes_max`.
        """
        check_size(payload, bytes_max=self.payload_bytes_max)
        await self._link.connection.send(reply_to, payload)

    def on_cancel(self, callback: Callable[[bytes], None]) -> None:
        """`callback` gets every `jobs.encode_cancel` payload that gateways send."""
        self._cancelled.append(callback)

    async def _prepare(self, connection: Connection) -> None:
        await connection.listen(CANCEL_SUBJECT, self._on_cancel)  # in force once the answers below are here
        await ensure_streams(connection, streams.streams(self._queue))
        for pull in list(self._pulls):
            await pull.open(connection)

    def _on_cancel(self, message: Message) -> None:
        for callback in self._cancelled:
            callback(message.data)

    async def _tend(self) -> None:
        """Renew expired pull requests, and rebuild what the server has lost."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):
                    await self._wake.wait()
            self._wake.clear()
            try:
                if any(pull.needs_repair for pull in self._pulls):
                    await asyncio.sleep(TEND_INTERVAL_S)  # a pull that breaks again and again must not spin
                    await ensure_streams(self._link.connection, streams.streams(self._queue))
                for pull in list(self._pulls):
                    await pull.tend(self._link.connection)
            except ApplianceError as error:
                _log.debug("pulls wait: %s", error.message)


class NatsConnection(Client):  # type: ignore[misc]  # nats-py is not followed by the type checker
    """One live connection: see `link.Connection`.

    nats-py's own reconnecting is off, since `Link` dials anew, and so is its buffering while disconnected. Five things
    are overridden or used below their underscore, because the public way costs or loses something:
    - `_ps`, the parser: `frames.py` costs less. It also goes around nats-py's delivery, which puts each message into a
      queue with a task behind it; when that is full ("slow consumer") messages are dropped. Here a slow listener slows
      the socket down instead.
    - `_pending` and `_flush_pending`: what `publish` comes to in the end, after checks that cost more than the sending.
    - `_close`: the only place that every kind of end passes.
    - `_connect_command`: the last moment before credentials leave.
    - `_send_unsubscribe`: the public `unsubscribe` also stops listening.
    nats-py's `flush` is not used: cancelled or late, its answer ends the read loop.
    """

    def __init__(self, *, role: Role, needs_tls: bool) -> None:
        super().__init__()
        self._ps = _Parser(self)
        self._inbox = f"{inbox_prefix(role)}.{secrets.token_hex(12)}"
        self._needs_tls = needs_tls
        self._lost = asyncio.Event()
        self._listeners: dict[int, Listener] = {}
        self._calls: dict[bytes, asyncio.Future[Message]] = {}
        self._calls_made = 0

    @property
    def lost(self) -> asyncio.Event:
        """Set for good when the connection has ended."""
        return self._lost

    @property
    def message_bytes_max(self) -> int:
        """Payload and headers of one message, as the server said."""
        return int(self.max_payload)

    async def listen(self, subject: str, listener: Listener) -> int:
        """Subscribe, and return the subscription's number."""
        with _translated():
            subscription = await self.subscribe(subject)
        number: int = subscription._id
        self._listeners[number] = listener
        return number

    async def hang_up(self, subscription: int) -> None:
        """Ask the server to send no more; what is on its way still reaches the listener."""
        with _translated():
            await self._send_unsubscribe(subscription)

    def forget(self, subscription: int) -> None:
        """Drop the listener."""
        self._listeners.pop(subscription, None)
        self._remove_sub(subscription)

    async def send(self, subject: str, payload: bytes, *, reply: str = "", headers: bytes = b"") -> None:
        """Publish, after waiting for room in the bounded buffer where needed."""
        try:
            frame = publish_frame(subject, payload, reply=reply, headers=headers)
        except ValueError as error:
            raise QueueUnavailable(f"NATS cannot carry this message: {error}") from error
        if self._pending_data_size + len(frame) > OUTBOUND_BYTES_MAX:
            await self._await_room(len(frame))
        if self._lost.is_set() or not self.is_connected:
            raise _gone(errors.ConnectionClosedError())
        self._pending.append(frame)
        self._pending_data_size += len(frame)
        if self._flush_queue.empty():
            await self._flush_pending()  # never waits: it wakes the task that writes what is pending

    async def call(self, subject: str, payload: bytes, *, headers: bytes = b"") -> bytes:
        """Publish and wait for the one answer."""
        if not self._calls_made:
            await self.listen(f"{self._inbox}.*", self._on_answer)
        self._calls_made += 1
        reply = f"{self._inbox}.{self._calls_made}"
        answer: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._calls[reply.encode()] = answer
        try:
            await self.send(subject, payload, reply=reply, headers=headers)
            async with asyncio.timeout(CALL_TIMEOUT_S):
                message = await answer
        except TimeoutError as error:
            reason = f"; the last error was: {self.last_error}" if self.last_error else ""
            raise QueueUnavailable(f"NATS did not answer {subject} within {CALL_TIMEOUT_S:g} s{reason}") from error
        finally:
            del self._calls[reply.encode()]
        if is_unanswered(message.headers):
            raise QueueUnavailable(f"nothing answers {subject}: is JetStream enabled on this NATS server and account?")
        return message.data

    async def close(self) -> None:
        """Send what is buffered, if possible, and end. May be called twice."""
        wait_s = CLOSE_WAIT_S if self.is_connected else CLOSE_WAIT_BROKEN_S
        with contextlib.suppress(TimeoutError, OSError, errors.Error):
            async with asyncio.timeout(wait_s):
                await super().close()
        self._end()

    async def _close(self, status: int, do_cbs: bool = True) -> None:
        self._end()
        # Flushing into a broken socket; uvloop calls one that it has closed a RuntimeError.
        with contextlib.suppress(OSError, RuntimeError):
            await super()._close(status, do_cbs)

    def _end(self) -> None:
        self._lost.set()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(QueueUnavailable("the connection to NATS was lost"))

    def deliver(self, subscription: int, message: Message) -> None:
        """Hand a message to its listener here, in the read loop."""
        listener = self._listeners.get(subscription)
        if listener is None:
            return
        try:
            listener(message)
        except Exception as error:  # a bug in a callback must not end the read loop of everybody else
            context = {"message": "a queue callback failed", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)

    def _connect_command(self) -> bytes:
        if self._needs_tls and not self._server_info.get("tls_required"):
            raise errors.Error("the server offers no TLS, so no credentials are sent to it")
        command: bytes = super()._connect_command()
        return command

    def _on_answer(self, message: Message) -> None:
        answer = self._calls.get(message.subject)
        if answer is not None and not answer.done():
            answer.set_result(message)

    async def _await_room(self, payload_bytes: int) -> None:
        """Only when the socket is slower than we are. nats-py's own waiting would swallow cancellation."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + OUTBOUND_WAIT_S
        while self.pending_data_size and self.pending_data_size + payload_bytes > OUTBOUND_BYTES_MAX:
            if self._lost.is_set() or loop.time() > deadline_s:
                raise QueueUnavailable(f"NATS takes no more data: {self.pending_data_size} B wait; retry later")
            await asyncio.sleep(0.005)


class _Parser(Parser):  # type: ignore[misc]  # nats-py is not followed by the type checker
    """Takes the messages out of the stream; what else the server says is nats-py's."""

    def __init__(self, connection: NatsConnection) -> None:
        self._connection = connection
        super().__init__(connection)

    def reset(self) -> None:
        """Begin with a new socket."""
        super().reset()
        self._frames = FrameReader(self._connection.deliver)

    async def parse(self, data: bytes = b"") -> None:
        """Take what the socket gave."""
        try:
            lines = self._frames.feed(data)
        except ValueError as error:
            raise errors.ProtocolError from error
        for line in lines:
            await super().parse(line)


def _dial_as(settings: NatsSettings, role: Role) -> Dial:
    """How this role connects with these settings."""

    async def dial(*, timeout_s: float, retry_wait_s: float) -> Connection:
        options = connect_options(settings)
        connection = NatsConnection(role=role, needs_tls="tls" in options)
        failure: Exception | None = None

        async def note(error: Exception) -> None:
            nonlocal failure
            failure = error
            await _note(error)

        try:
            async with asyncio.timeout(timeout_s):
                with _unswallowed_cancellation():
                    await connection.connect(
                        error_cb=note,
                        name=f"appliance {role}",
                        allow_reconnect=False,
                        connect_timeout=timeout_s,
                        reconnect_time_wait=retry_wait_s,
                        max_reconnect_attempts=1,  # of each server; 0 and less mean for ever. The link tries again
                        ping_interval=PING_INTERVAL_S,
                        max_outstanding_pings=PINGS_UNANSWERED_MAX,
                        pending_size=0,  # while disconnected nothing is buffered, and publishing never waits in nats-py
                        **options,
                    )
        except (TimeoutError, OSError, errors.Error) as error:
            # That no server is left, or no time, says less than how the last server failed.
            says_little = isinstance(error, errors.NoServersError) or not str(error)
            reason = str((failure if says_little else None) or error) or "no answer"
            await connection.close()
            raise _cannot_connect(settings, reason) from error
        except BaseException:
            await connection.close()
            raise
        return connection

    return dial


@contextlib.contextmanager
def _unswallowed_cancellation() -> Iterator[None]:
    """Raise the cancellation that came in the block and was lost there.

    Python 3.11's `asyncio.wait_for`, which nats-py connects with, drops one that comes as what it waits for ends.
    """
    task = asyncio.current_task()
    assert task is not None, "connecting is done in a task"
    asked = task.cancelling()
    try:
        yield
    finally:
        if task.cancelling() > asked:
            raise asyncio.CancelledError


def _cannot_connect(settings: NatsSettings, reason: str) -> ApplianceError:
    url = shown_url(settings.url)
    if "authorization violation" in reason.lower():
        return StartupError(f"NATS at {url} refuses our credentials; check nats.user, nats.password or the key file")
    advice = "check nats.url and that the server runs"
    if "certificate_verify_failed" in reason.lower():
        advice = (
            "check that nats.tls_ca_file holds the authority that signed the server's certificate, for this host name"
        )
    return QueueUnavailable(f"cannot connect to NATS at {url}: {reason}; {advice}")


def _not_confirmed(job: Unconfirmed) -> QueueUnavailable:
    return QueueUnavailable(f"the queue did not confirm job {job.job_id}; retry later")


async def _note(error: Exception) -> None:
    if "permissions violation" in str(error).lower():
        _log.error("NATS does not permit us something the appliance needs: %s", error)
    else:
        _log.debug("nats: %r", error)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (errors.Error, OSError) as error:
        raise _gone(error) from error


def _gone(error: Exception) -> QueueUnavailable:
    return QueueUnavailable(f"the connection to NATS is gone ({error!r}); retry later")
