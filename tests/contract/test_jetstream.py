"""What only the queue on NATS can get wrong: lost servers, streams, consumers and confirmations."""

import asyncio
import contextlib

import pytest

from appliance.errors import QueueUnavailable, StartupError
from appliance.queue.jetstream import JetStreamGatewayQueue, JetStreamNodeQueue, NatsConnection
from appliance.queue.subjects import consumer_name
from appliance.settings import NatsSettings, QueueSettings
from tests.contract.queues import (
    SETTINGS,
    Gateway,
    OnNats,
    api,
    gateway_of,
    nats_client,
    never,
    node_of,
    until,
)
from tests.nats import NatsServer

pytestmark = pytest.mark.slow


@pytest.fixture
def broker(nats_server: NatsServer) -> OnNats:
    """The queue on a fresh NATS server."""
    return OnNats(SETTINGS, nats_server)


async def test_nodes_and_gateways_recover_from_several_restarts(broker: OnNats, nats_server: NatsServer) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(100)
        for round_ in range(1, 3):
            nats_server.restart()
            await until(lambda expected=round_: gateway.restored == expected)  # type: ignore[misc]
            await gateway.submit(b"round %d" % round_)
            await until(lambda expected=round_: b"round %d" % expected in node.payloads)  # type: ignore[misc]


async def test_a_pull_opened_while_nats_is_away_opens_on_its_return(broker: OnNats, nats_server: NatsServer) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node:
        nats_server.kill()
        async with node.pull() as pull:
            await pull.want(1)
            nats_server.start()
            await until(lambda: gateway.restored == 1)
            await gateway.submit(b"job")
            assert (await node.next()).payload == b"job"


async def test_leaving_while_nats_is_away_does_not_hang(broker: OnNats, nats_server: NatsServer) -> None:
    async with asyncio.timeout(8), gateway_of(broker), node_of(broker) as node, node.pull() as pull:
        await pull.want(10)
        nats_server.kill()


async def test_a_deleted_consumer_is_made_anew(broker: OnNats, nats_server: NatsServer) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(10)
        async with nats_client(nats_server.url) as client:
            name = consumer_name("interactive", "model")
            assert (await api(client, f"CONSUMER.DELETE.JOBS_INTERACTIVE.{name}"))["success"]
        await gateway.submit(b"job")
        assert (await node.next()).payload == b"job"


async def test_a_deleted_stream_is_made_anew(broker: OnNats, nats_server: NatsServer) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(10)
        async with nats_client(nats_server.url) as client:
            assert (await api(client, "STREAM.DELETE.JOBS_INTERACTIVE"))["success"]
        await gateway.submit(b"job")
        assert (await node.next()).payload == b"job"
        assert gateway.refused == []


async def test_a_frozen_server_costs_nothing_but_time(broker: OnNats, nats_server: NatsServer) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(10)
        nats_server.freeze()
        await gateway.submit(b"job")
        await never(lambda: bool(node.deliveries), timeout_s=2.5)  # the job has been sent twice by now
        nats_server.thaw()
        await (await node.next()).ack()
        await never(lambda: len(node.deliveries) > 1, timeout_s=1.0)
        assert gateway.refused == []


async def test_a_job_that_is_never_confirmed_is_refused(
    broker: OnNats, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.queue.outbox.GIVE_UP_S", 0.5)
    async with gateway_of(broker) as gateway:
        nats_server.freeze()
        try:
            await gateway.submit(b"job")
            await until(lambda: bool(gateway.refused))
        finally:
            nats_server.thaw()
        [(job_id, error)] = gateway.refused
        assert job_id == "job"
        assert type(error) is QueueUnavailable


async def test_what_arrives_while_a_pull_closes_is_given_back_at_once(nats_server: NatsServer) -> None:
    patient = OnNats(QueueSettings(ack_wait_s=60), nats_server)
    async with gateway_of(patient) as gateway, node_of(patient) as first, node_of(patient) as second:
        async with first.pull() as pull:
            await pull.want(200)
            submitting = asyncio.create_task(_submit_many(gateway, 200))
            await first.next()
        for delivery in first.deliveries:
            await delivery.ack()
        async with second.pull() as pull:
            await pull.want(200)
            await submitting
            await until(lambda: len({*first.payloads, *second.payloads}) == 200)


async def _submit_many(gateway: Gateway, count: int) -> None:
    for number in range(count):
        await gateway.submit(b"%d" % number)
        await asyncio.sleep(0)


async def test_expired_pull_requests_are_renewed(broker: OnNats, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.queue.pull.EXPIRES_S", 1.1)
    monkeypatch.setattr("appliance.queue.pull.HEARTBEAT_S", 0.5)
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(3)
        await never(lambda: bool(node.deliveries), timeout_s=2.4)
        for number in range(5):
            await gateway.submit(b"%d" % number)
        await node.next(3)
        await never(lambda: len(node.deliveries) > 3)


async def test_a_pull_that_seems_forgotten_is_made_anew_and_the_old_one_taken_back(
    broker: OnNats, nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("appliance.queue.demand.SILENCE_MAX_S", 0.3)  # shorter than the server's heartbeat
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        with caplog.at_level("INFO"):
            await pull.want(3)
            await until(lambda: sum("asking anew" in message for message in caplog.messages) >= 2)
        async with nats_client(nats_server.url) as client:
            name = f"JOBS_INTERACTIVE.{consumer_name('interactive', 'model')}"
            assert (await api(client, f"CONSUMER.INFO.{name}"))["num_waiting"] <= 1
        for number in range(9):
            await gateway.submit(b"%d" % number)
        await node.next(3)
        await never(lambda: len(node.deliveries) > 3)


async def test_streams_are_updated_to_changed_limits(broker: OnNats, nats_server: NatsServer) -> None:
    async with gateway_of(broker):
        pass
    changed = QueueSettings(ack_wait_s=2, interactive_bytes_max=8 * 1024 * 1024, bulk_bytes_max=2 * 1024 * 1024)
    async with gateway_of(OnNats(changed, nats_server)), nats_client(nats_server.url) as client:
        stream = await api(client, "STREAM.INFO.JOBS_INTERACTIVE")
        assert stream["config"]["max_bytes"] == 8 * 1024 * 1024
        assert (stream["config"]["retention"], stream["config"]["discard"]) == ("workqueue", "new")
        assert stream["config"]["storage"] == "memory"


async def test_racing_creators_agree(broker: OnNats) -> None:
    async def come_and_go() -> None:
        async with gateway_of(broker), node_of(broker) as node, node.pull():
            pass

    await asyncio.gather(*(come_and_go() for _ in range(5)))


async def test_a_stream_that_cannot_be_changed_stops_start_up(nats_server: NatsServer) -> None:
    async with nats_client(nats_server.url) as client:
        made = await api(
            client, "STREAM.CREATE.JOBS_BULK", {"name": "JOBS_BULK", "subjects": ["jobs.bulk.*"], "storage": "memory"}
        )
        assert "error" not in made
    with pytest.raises(StartupError, match=r"JOBS_BULK.*can not change"):
        async with gateway_of(OnNats(SETTINGS, nats_server)):
            pass


async def test_limits_over_the_servers_stop_start_up(nats_server: NatsServer) -> None:
    greedy = QueueSettings(interactive_bytes_max=1024**4)
    with pytest.raises(StartupError, match=r"JOBS_INTERACTIVE.*insufficient memory"):
        async with node_of(OnNats(greedy, nats_server)):
            pass


async def test_a_server_that_is_not_there_stops_start_up(nats_server: NatsServer) -> None:
    nats_server.kill()
    away = NatsSettings(url=f"nats://user:hidden@127.0.0.1:{nats_server.port}", connect_timeout_s=0.3)
    for queue in (JetStreamGatewayQueue(away, SETTINGS, Gateway()), JetStreamNodeQueue(away, SETTINGS)):
        with pytest.raises(StartupError, match=r"nats://127\.0\.0\.1.*connect_timeout_s") as raised:
            async with queue:
                pass
        assert "hidden" not in str(raised.value)


@pytest.fixture
def dialling(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Set once a connection is tried. A cancellation that comes then is lost, as in Python 3.11's `wait_for`."""
    began = asyncio.Event()

    async def connect(*_: object) -> None:
        if not began.is_set():
            began.set()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        raise ConnectionRefusedError("refused")

    monkeypatch.setattr(NatsConnection, "_connect_to_server", connect)
    return began


async def test_start_up_is_given_up_in_time_although_its_cancellation_is_lost(dialling: asyncio.Event) -> None:
    away = NatsSettings(url="nats://127.0.0.1:1", connect_timeout_s=0.3)
    async with asyncio.timeout(5):
        with pytest.raises(StartupError, match=r"refused; check nats\.url.*connect_timeout_s"):
            async with JetStreamGatewayQueue(away, SETTINGS, Gateway()):
                pass
    assert dialling.is_set()


async def test_connecting_can_be_cancelled_although_its_cancellation_is_lost(dialling: asyncio.Event) -> None:
    away = JetStreamNodeQueue(NatsSettings(url="nats://127.0.0.1:1", connect_timeout_s=60), SETTINGS)
    entering = asyncio.create_task(away.__aenter__())
    await dialling.wait()
    entering.cancel()
    await asyncio.wait([entering], timeout=5)
    assert entering.cancelled()


async def test_a_server_that_starts_a_moment_later_is_waited_for(nats_server: NatsServer) -> None:
    nats_server.kill()
    entering = asyncio.create_task(_enter_and_leave(OnNats(SETTINGS, nats_server)))
    await never(entering.done)
    nats_server.start()
    await entering


async def _enter_and_leave(broker: OnNats) -> None:
    async with gateway_of(broker):
        pass


async def test_a_failing_listener_does_not_stop_the_others(broker: OnNats) -> None:
    told: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context["exception"])))

    class Broken(Gateway):
        def on_replies(self, payload: bytes) -> None:
            super().on_replies(payload)
            raise ValueError(payload.decode())

    gateway = Broken()
    async with broker.gateway_queue(gateway) as queue, node_of(broker) as node:
        await node.queue.reply(queue.reply_to, b"one")
        await node.queue.reply(queue.reply_to, b"two")
        await until(lambda: len(gateway.replies) == 2)
        assert told == ["one", "two"]
