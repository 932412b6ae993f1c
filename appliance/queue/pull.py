"""`JetStreamPull`: one standing demand on a durable pull consumer, and the deliveries it yields."""

import asyncio
import logging
import secrets
from collections.abc import Callable

import msgspec

from appliance.errors import ApplianceError, QueueUnavailable, StartupError
from appliance.jobs import Lane
from appliance.queue import streams
from appliance.queue.base import Delivery
from appliance.queue.demand import EXPIRES_S, HEARTBEAT_S, Demand
from appliance.queue.frames import Message
from appliance.queue.headers import Status, dead_headers, decode_status
from appliance.queue.link import Connection, Link
from appliance.queue.subjects import dead_subject, inbox_prefix, stream_name
from appliance.settings import QueueSettings

_log = logging.getLogger(__name__)


class JetStreamPull:
    """Keeps the server informed of how many jobs of one model and lane this node wants.

    On each connection it has a fresh inbox, so nothing that an earlier connection asked for can arrive twice.
    """

    def __init__(
        self,
        *,
        lane: Lane,
        model: str,
        settings: QueueSettings,
        link: Link,
        on_delivery: Callable[[Delivery], None],
        wake: Callable[[], None],
    ) -> None:
        """`wake` asks the owner to call `tend` soon: callbacks cannot send."""
        self._lane = lane
        self._model = model
        self._settings = settings
        self._link = link
        self._on_delivery = on_delivery
        self._wake = wake
        self._demand = Demand(now=_now())
        self._opening = asyncio.Lock()
        self._connection: Connection | None = None
        self._inbox = ""
        self._subscription = 0
        self._is_lost = False
        self._is_closed = False
        self._leftovers: list[Delivery] = []  # arrived while closing; at most what was outstanding

    async def want(self, jobs: int) -> None:
        """Ask for up to `jobs` more deliveries in all, those still outstanding included. 0 stops asking."""
        self._demand.want(jobs)
        await self._ask()

    async def recall(self) -> None:
        """Take back what was asked for: once it returns, nothing arrives until the next `want`."""
        self._demand.want(0)
        async with self._opening:
            if not self._is_closed and self._connection is not None and not self._connection.lost.is_set():
                await self._hang_up()
                await self._listen(self._connection)

    async def open(self, connection: Connection) -> None:
        """Create the consumer and ask anew, once per connection. Raises like `_create_consumer`."""
        async with self._opening:
            if self._is_closed or self._connection is connection:
                return
            await self._open(connection)
        await self._ask()

    async def tend(self, connection: Connection) -> None:
        """Renew what has expired, and begin anew when the server seems to have lost the pull. Raises like `open`."""
        if self._is_closed:
            return
        if self.needs_repair:
            _log.info("asking anew for the jobs of %s (%s): the server may have lost the pull", self._model, self._lane)
            async with self._opening:
                await self._hang_up()
                await self._open(connection)
        await self._ask()

    @property
    def needs_repair(self) -> bool:
        """The consumer is gone, or silent for too long."""
        return self._is_lost or self._demand.is_silent(now=_now())

    async def close(self) -> None:
        """Stop, and give back at once what was already on its way here."""
        self._demand.want(0)
        async with self._opening:
            self._is_closed = True
            await self._hang_up()
            for delivery in self._leftovers:
                await delivery.give_back()

    async def _hang_up(self) -> None:
        """End the subscription, and with it all requests; hear what was already on its way."""
        if self._connection is None or self._connection.lost.is_set():
            return
        try:
            await self._connection.hang_up(self._subscription)
            # Messages come in the order they were sent, so after this answer nothing more can arrive.
            await self._connection.call(streams.consumer_info_subject(self._lane, self._model), b"")
        except QueueUnavailable:
            _log.debug("the connection went while a pull ended; its jobs are redelivered")
        self._connection.forget(self._subscription)

    async def _open(self, connection: Connection) -> None:
        await _create_consumer(connection, self._lane, self._model, self._settings)
        await self._listen(connection)

    async def _listen(self, connection: Connection) -> None:
        """On a fresh inbox: of what was asked for on another nothing counts."""
        self._demand.lost()
        self._inbox = f"{inbox_prefix('node')}.{secrets.token_hex(12)}"
        self._subscription = await connection.listen(self._inbox, self._hear)
        self._connection = connection
        self._is_lost = False

    async def _ask(self) -> None:
        if self._connection is None or self._connection.lost.is_set() or self._is_lost:
            return  # opening it again asks
        batch = self._demand.ask(now=_now())
        if batch:
            request = streams.PullRequest(batch, streams.nanoseconds(EXPIRES_S), streams.nanoseconds(HEARTBEAT_S))
            try:
                await self._connection.send(
                    streams.pull_subject(self._lane, self._model), msgspec.json.encode(request), reply=self._inbox
                )
            except QueueUnavailable:
                self._demand.lost()

    def _hear(self, message: Message) -> None:
        if message.reply.startswith(streams.ACK_PREFIX):
            self._demand.delivered(now=_now())
            delivery = JetStreamDelivery(message, lane=self._lane, model=self._model, link=self._link)
            if self._is_closed:
                self._leftovers.append(delivery)
            else:
                self._on_delivery(delivery)
            return
        self._hear_status(decode_status(message.headers))

    def _hear_status(self, status: Status) -> None:
        match status.code:
            case 100:  # idle heartbeat
                self._demand.heartbeat(now=_now())
            case 404 | 408:  # nothing there, or expired
                self._demand.ended(status.unserved, now=_now())
                self._wake()
            case code:  # 409: consumer deleted, leader changed, server shutting down, …; 503: nobody there
                _log.info("the pull for %s (%s) ended: %d %s", self._model, self._lane, code, status.text)
                self._demand.lost()
                self._is_lost = True
                self._wake()


class JetStreamDelivery:
    """One job, and the subject that settles it.

    A settlement that is lost, because the connection is, leads to a redelivery; it is no error.
    """

    __slots__ = ("_is_settled", "_lane", "_link", "_message", "_model", "attempt", "payload")

    def __init__(self, message: Message, *, lane: Lane, model: str, link: Link) -> None:
        self._message = message
        self._lane = lane
        self._model = model
        self._link = link
        self._is_settled = False
        self.payload = message.data
        self.attempt = streams.attempt_of(message.reply)

    async def ack(self) -> None:
        """Done with it, answered: remove the job."""
        await self._settle(streams.ACK)

    async def extend(self) -> None:
        """Still at it: start the ack wait anew."""
        if not self._is_settled:
            await self._tell(streams.IN_PROGRESS)

    async def give_back(self, *, delay_s: float = 0.0) -> None:
        """Not done: deliver it again, to any node, after the delay."""
        await self._settle(streams.nak(delay_s))

    async def bury(self, reason: str) -> None:
        """Store payload and reason as a dead letter, then remove the job.

        Raises `QueueUnavailable` when the dead letter cannot be stored; the job then stays in the queue.
        """
        if self._is_settled:
            return
        headers = dead_headers(
            letter_id=streams.stored_id(self._message.reply), reason=reason, model=self._model, attempt=self.attempt
        )
        answer = await self._link.connection.call(dead_subject(self._lane, self._model), self.payload, headers=headers)
        error = streams.decode_answer(answer).error
        if error is not None:
            raise QueueUnavailable(f"the dead letter was not stored: {error.description} ({error.err_code})")
        await self._settle(streams.term(reason))

    async def _settle(self, answer: bytes) -> None:
        if not self._is_settled:
            self._is_settled = True
            await self._tell(answer)

    async def _tell(self, answer: bytes) -> None:
        try:
            await self._link.connection.send(self._message.reply.decode(), answer)
        except QueueUnavailable:
            _log.debug("a settlement was lost with the connection; the job is redelivered")


async def _create_consumer(connection: Connection, lane: Lane, model: str, settings: QueueSettings) -> None:
    """Create or update the durable consumer.

    Raises `StartupError` when the server refuses it, `QueueUnavailable` when it cannot say.
    """
    request = streams.CreateConsumer(stream_name(lane), streams.consumer(lane, model, settings))
    answer = await connection.call(streams.create_consumer_subject(lane, model), msgspec.json.encode(request))
    error = streams.decode_answer(answer).error
    if error is not None:
        raise _consumer_refused(model, lane, error)


def _consumer_refused(model: str, lane: Lane, error: streams.ApiError) -> ApplianceError:
    message = f"NATS refuses the consumer of {model} ({lane}): {error.description} ({error.err_code})"
    if error.code in {404, 503}:  # the stream is gone, which the owner mends; or JetStream is starting
        return QueueUnavailable(message)
    return StartupError(f"{message}; remove the consumer that is in the way, or change queue.ack_wait_s back")


def _now() -> float:
    return asyncio.get_running_loop().time()
