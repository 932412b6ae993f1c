"""One face over the queues under test: `Broker` makes gateways and nodes, and those record what they hear."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import nats

from appliance.errors import ApplianceError
from appliance.jobs import Lane
from appliance.queue.base import Delivery, GatewayListener, GatewayQueue, NodeQueue, Pull
from appliance.queue.jetstream import JetStreamGatewayQueue, JetStreamNodeQueue
from appliance.queue.memory import MemoryBroker
from appliance.settings import NatsSettings, QueueSettings
from tests.nats import NatsServer

SETTINGS = QueueSettings(
    ack_wait_s=0.5,
    interactive_bytes_max=16 * 1024 * 1024,
    bulk_bytes_max=1024 * 1024,
    dead_bytes_max=16 * 1024 * 1024,
)
DEADLINE_S = 10.0
SILENCE_S = 0.15  # how long nothing must happen; a failure shows within it, a pass costs it


class Broker(Protocol):
    """A queue under test."""

    settings: QueueSettings

    def gateway_queue(self, listener: GatewayListener) -> contextlib.AbstractAsyncContextManager[GatewayQueue]: ...
    def node_queue(self) -> contextlib.AbstractAsyncContextManager[NodeQueue]: ...
    async def dead_letters(self) -> list[tuple[str, int, str, bytes]]: ...
    def stop(self) -> None: ...
    def start(self) -> None: ...


class InMemory:
    """The queue of `queue.memory`."""

    def __init__(self, settings: QueueSettings) -> None:
        self.settings = settings
        self._broker = MemoryBroker(settings)
        self.stop = self._broker.stop
        self.start = self._broker.start

    def gateway_queue(self, listener: GatewayListener) -> contextlib.AbstractAsyncContextManager[GatewayQueue]:
        return self._broker.gateway_queue(listener)

    def node_queue(self) -> contextlib.AbstractAsyncContextManager[NodeQueue]:
        return self._broker.node_queue()

    async def dead_letters(self) -> list[tuple[str, int, str, bytes]]:
        """Model, attempt, reason, payload."""
        return [(letter.model, letter.attempt, letter.reason, letter.payload) for letter in self._broker.dead_letters]


class OnNats:
    """The queue of `queue.jetstream`, on a server of the test's own."""

    def __init__(self, settings: QueueSettings, server: NatsServer) -> None:
        self.settings = settings
        self._server = server
        self._nats = NatsSettings(url=server.url)
        self.stop = server.kill
        self.start = server.start

    def gateway_queue(self, listener: GatewayListener) -> contextlib.AbstractAsyncContextManager[GatewayQueue]:
        return JetStreamGatewayQueue(self._nats, self.settings, listener)

    def node_queue(self) -> contextlib.AbstractAsyncContextManager[NodeQueue]:
        return JetStreamNodeQueue(self._nats, self.settings)

    async def dead_letters(self) -> list[tuple[str, int, str, bytes]]:
        """Model, attempt, reason, payload, as any NATS client reads them."""
        async with nats_client(self._server.url) as client:
            jetstream = client.jetstream()
            count = (await jetstream.stream_info("DEAD")).state.messages
            reader = await jetstream.subscribe("dead.>", ordered_consumer=True)
            letters = [await reader.next_msg(timeout=5) for _ in range(count)]
            await reader.unsubscribe()
        return [
            (
                letter.headers["Appliance-Model"],
                int(letter.headers["Appliance-Attempt"]),
                letter.headers["Appliance-Reason"],
                letter.data,
            )
            for letter in letters
        ]


@contextlib.asynccontextmanager
async def nats_client(url: str, **options: Any) -> AsyncIterator[Any]:  # nats-py is untyped here
    """A plain client beside ours."""
    client = await nats.connect(url, **options)
    try:
        yield client
    finally:
        await client.close()


async def api(client: Any, subject: str, body: object = None) -> Any:
    """One call of the JetStream API."""
    answer = await client.request(f"$JS.API.{subject}", json.dumps(body).encode() if body else b"", timeout=5)
    return json.loads(answer.data)


class Gateway:
    """A listener that records, with its queue once that is entered."""

    def __init__(self) -> None:
        self.replies: list[bytes] = []
        self.refused: list[tuple[str, ApplianceError]] = []
        self.restored = 0
        self.queue: GatewayQueue

    def on_replies(self, payload: bytes) -> None:
        self.replies.append(payload)

    def on_refused(self, job_id: str, error: ApplianceError) -> None:
        self.refused.append((job_id, error))

    def on_restored(self) -> None:
        self.restored += 1

    async def submit(
        self, payload: bytes, *, model: str = "model", lane: Lane = "interactive", message_id: str = ""
    ) -> None:
        """Submit with ids made from the payload's first bytes."""
        name = payload[:32].decode("latin-1")
        await self.queue.submit(job_id=name, message_id=message_id or name, model=model, lane=lane, payload=payload)


class Node:
    """Records deliveries."""

    def __init__(self, queue: NodeQueue) -> None:
        self.queue = queue
        self.deliveries: list[Delivery] = []

    @property
    def payloads(self) -> list[bytes]:
        """What was delivered, in order."""
        return [delivery.payload for delivery in self.deliveries]

    def pull(self, model: str = "model", lane: Lane = "interactive") -> contextlib.AbstractAsyncContextManager[Pull]:
        """Open a pull that records here."""
        return self.queue.pull(model=model, lane=lane, on_delivery=self.deliveries.append)

    async def next(self, count: int = 1) -> Delivery:
        """Wait until `count` deliveries have arrived in all; return the last of them."""
        await until(lambda: len(self.deliveries) >= count)
        return self.deliveries[count - 1]


@contextlib.asynccontextmanager
async def gateway_of(broker: Broker) -> AsyncIterator[Gateway]:
    """An entered gateway."""
    gateway = Gateway()
    async with broker.gateway_queue(gateway) as queue:
        gateway.queue = queue
        yield gateway


@contextlib.asynccontextmanager
async def node_of(broker: Broker) -> AsyncIterator[Node]:
    """An entered node."""
    async with broker.node_queue() as queue:
        yield Node(queue)


async def until(condition: Callable[[], bool], *, timeout_s: float = DEADLINE_S) -> None:
    """Wait for a condition, with a deadline."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        assert asyncio.get_running_loop().time() < deadline_s, "the condition did not come true in time"
        await asyncio.sleep(0.002)


async def never(condition: Callable[[], bool], *, timeout_s: float = SILENCE_S) -> None:
    """Watch that a condition stays false for a while."""
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while asyncio.get_running_loop().time() < deadline_s:
        assert not condition(), "what must not happen has happened"
        await asyncio.sleep(0.01)
