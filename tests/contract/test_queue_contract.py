"""What every queue promises, checked on each."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from appliance.errors import BodyTooLarge, Overloaded, QueueUnavailable
from appliance.jobs import Cancel, decode_cancel
from appliance.queue.subjects import ALL_GATEWAYS
from appliance.settings import QueueSettings
from tests.contract.queues import SETTINGS, Broker, InMemory, OnNats, gateway_of, never, node_of, until
from tests.nats import NatsServer

pytestmark = pytest.mark.slow


@pytest.fixture(params=["memory", "nats"])
def broker_with(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[QueueSettings], Broker]]:
    """Makes each queue in turn, empty; NATS on a server of the test's own."""
    if request.param == "memory":
        yield InMemory
    else:
        with NatsServer(tmp_path) as server:
            yield lambda settings: OnNats(settings, server)


@pytest.fixture
def broker(broker_with: Callable[[QueueSettings], Broker]) -> Broker:
    """Each queue in turn, with the settings of most tests."""
    return broker_with(SETTINGS)


async def test_a_job_is_delivered_and_an_ack_removes_it(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(10)
        await gateway.submit(b"job")
        delivery = await node.next()

        assert (delivery.payload, delivery.attempt) == (b"job", 1)
        await delivery.ack()
        await never(lambda: len(node.deliveries) > 1, timeout_s=broker.settings.ack_wait_s * 1.6)
        assert gateway.refused == []


async def test_a_job_submitted_before_anybody_pulls_is_kept(broker: Broker) -> None:
    async with gateway_of(broker) as gateway:
        await gateway.submit(b"early")
        async with node_of(broker) as node, node.pull() as pull:
            await pull.want(1)
            assert (await node.next()).payload == b"early"


async def test_nothing_is_delivered_before_it_is_wanted(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull():
        await gateway.submit(b"job")
        await never(lambda: bool(node.deliveries))


async def test_a_job_that_is_not_settled_is_delivered_again_with_the_next_attempt(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(3)
        await gateway.submit(b"job")
        again = await node.next(2)

        assert (again.payload, again.attempt) == (b"job", 2)
        await again.ack()


async def test_a_job_of_a_node_that_has_gone_goes_to_another(broker: Broker) -> None:
    async with gateway_of(broker) as gateway:
        async with node_of(broker) as first, first.pull() as pull:
            await pull.want(1)
            await gateway.submit(b"job")
            await first.next()
        async with node_of(broker) as second, second.pull() as pull:
            await pull.want(1)
            assert (await second.next()).attempt == 2


async def test_extending_prevents_redelivery(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(5)
        await gateway.submit(b"long")
        delivery = await node.next()
        for _ in range(6):
            await delivery.extend()
            await never(lambda: len(node.deliveries) > 1, timeout_s=broker.settings.ack_wait_s / 3)
        await delivery.ack()


async def test_a_job_given_back_comes_again_at_once(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(2)
        await gateway.submit(b"job")
        await (await node.next()).give_back()
        again = await node.next(2)

        assert again.attempt == 2
        await again.ack()


async def test_recalled_demand_brings_nothing_until_it_is_renewed(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as first, first.pull() as pull:
        await pull.want(8)
        await gateway.submit(b"taken")
        delivery = await first.next()
        await pull.recall()
        await delivery.give_back()
        await never(lambda: len(first.deliveries) > 1, timeout_s=0.2)

        async with node_of(broker) as second, second.pull() as other:
            await other.want(1)
            assert (await second.next()).attempt == 2
            await second.deliveries[0].ack()
        await pull.want(1)
        await gateway.submit(b"next")
        assert (await first.next(2)).payload == b"next"


async def test_a_job_given_back_with_a_delay_waits_for_it(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(2)
        await gateway.submit(b"job")
        await (await node.next()).give_back(delay_s=0.4)
        await never(lambda: len(node.deliveries) > 1, timeout_s=0.3)
        assert (await node.next(2)).attempt == 2


async def test_a_buried_job_lies_in_the_dead_letters_and_is_not_delivered_again(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(5)
        await gateway.submit(b"poison")
        await (await node.next()).give_back()
        await (await node.next(2)).bury("crashed\r\nthe engine twice")

        await never(lambda: len(node.deliveries) > 2, timeout_s=broker.settings.ack_wait_s * 1.6)
        [(model, attempt, reason, payload)] = await broker.dead_letters()
        assert (model, attempt, payload) == ("model", 2, b"poison")
        assert " ".join(reason.split()) == "crashed the engine twice"


async def test_a_buried_job_may_be_as_large_as_the_queue_takes(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull("ü" * 60) as pull:
        await pull.want(1)
        await gateway.submit(b"large".ljust(gateway.queue.payload_bytes_max, b"."), model="ü" * 60)
        await (await node.next()).bury("€" * 5000)

        [(model, _, reason, payload)] = await broker.dead_letters()
        assert ("ü" * 60, gateway.queue.payload_bytes_max) == (model, len(payload))
        assert reason.startswith("€€€")


async def test_only_the_first_settlement_counts(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(2)
        await gateway.submit(b"job")
        delivery = await node.next()
        await delivery.give_back(delay_s=0.1)
        await delivery.ack()
        await delivery.bury("no")

        assert (await node.next(2)).attempt == 2
        assert await broker.dead_letters() == []


async def test_a_late_ack_still_removes_the_job(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(1)
        await gateway.submit(b"slow")
        late = await node.next()
        await never(lambda: len(node.deliveries) > 1, timeout_s=broker.settings.ack_wait_s * 1.4)
        await late.ack()
        await until_settled()
        await pull.want(1)
        await never(lambda: len(node.deliveries) > 1, timeout_s=broker.settings.ack_wait_s)


async def until_settled() -> None:
    """Let a settlement reach the server before a request that was sent on another subject."""
    await never(lambda: False, timeout_s=0.05)


async def test_the_same_message_id_stores_one_job(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(5)
        await gateway.submit(b"one", message_id="same")
        await gateway.submit(b"two", message_id="same")
        await gateway.submit(b"three", message_id="other")
        await (await node.next(2)).ack()
        await never(lambda: len(node.deliveries) > 2)

        assert node.payloads == [b"one", b"three"]
        assert gateway.refused == []


@pytest.mark.parametrize("message_id", ["ends with space ", "line\r\nbreak: x", "ünïcode", "x" * 5000])
async def test_message_ids_are_data(broker: Broker, message_id: str) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(5)
        await gateway.submit(b"one", message_id=message_id)
        await gateway.submit(b"two", message_id=message_id.strip() + "!")
        await gateway.submit(b"three", message_id=message_id)
        await node.next(2)
        await never(lambda: len(node.deliveries) > 2)

        assert node.payloads == [b"one", b"two"]


async def test_a_full_queue_refuses_at_once_and_takes_jobs_again_when_there_is_room(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull(lane="bulk") as pull:
        for number in range(12):
            await gateway.submit(b"%d " % number + b"." * 100_000, lane="bulk")
        await until(lambda: len(gateway.refused) >= 2)

        assert all(isinstance(error, Overloaded) for _, error in gateway.refused)
        assert not any(isinstance(error, QueueUnavailable) for _, error in gateway.refused)
        refused = len(gateway.refused)
        await pull.want(1)
        await (await node.next()).ack()
        await until_settled()
        await gateway.submit(b"later" + b"." * 100_000, lane="bulk")
        await never(lambda: len(gateway.refused) > refused)


async def test_two_nodes_share_a_queue_and_each_job_is_delivered_once(broker: Broker) -> None:
    async with (
        gateway_of(broker) as gateway,
        node_of(broker) as first,
        node_of(broker) as second,
        first.pull() as one,
        second.pull() as other,
    ):
        await one.want(20)
        await other.want(20)
        for number in range(40):
            await gateway.submit(b"%d" % number)
        await until(lambda: len(first.deliveries) + len(second.deliveries) == 40)
        for delivery in first.deliveries + second.deliveries:
            await delivery.ack()
        await never(lambda: len(first.deliveries) + len(second.deliveries) > 40)

        assert {b"%d" % number for number in range(40)} == {*first.payloads, *second.payloads}
        assert (len(first.deliveries), len(second.deliveries)) == (20, 20)


async def test_no_more_is_delivered_than_wanted(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        for number in range(10):
            await gateway.submit(b"%d" % number)
        await pull.want(3)
        await node.next(3)
        await never(lambda: len(node.deliveries) > 3)
        await pull.want(4)
        await node.next(7)
        await never(lambda: len(node.deliveries) > 7)


async def test_a_wish_that_is_raised_counts_what_is_outstanding(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(2)
        await pull.want(3)
        await pull.want(5)
        for number in range(10):
            await gateway.submit(b"%d" % number)
        await node.next(5)
        await never(lambda: len(node.deliveries) > 5)


async def test_wanting_nothing_stops_asking(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(2)
        await pull.want(0)
        for number in range(10):
            await gateway.submit(b"%d" % number)
        await never(lambda: len(node.deliveries) > 2)
        await pull.want(8)
        await node.next(8)


async def test_jobs_come_in_the_order_of_submission(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(100)
        for number in range(100):
            await gateway.submit(b"%d" % number)
        await node.next(100)

        assert [b"%d" % number for number in range(100)] == node.payloads


async def test_lanes_and_models_are_separate(broker: Broker) -> None:
    async with (
        gateway_of(broker) as gateway,
        node_of(broker) as a,
        node_of(broker) as b,
        node_of(broker) as bulk,
        a.pull("a") as pull_a,
        b.pull("b") as pull_b,
        bulk.pull("a", "bulk") as pull_bulk,
    ):
        for pull in (pull_a, pull_b, pull_bulk):
            await pull.want(5)
        await gateway.submit(b"for a", model="a")
        await gateway.submit(b"for b", model="b")
        await gateway.submit(b"for bulk", model="a", lane="bulk")
        for node in (a, b, bulk):
            await (await node.next()).ack()
        await never(lambda: any(len(node.deliveries) > 1 for node in (a, b, bulk)))

        assert [a.payloads, b.payloads, bulk.payloads] == [[b"for a"], [b"for b"], [b"for bulk"]]


@pytest.mark.parametrize(
    "model", ["BAAI/bge-m3", "Qwen2.5-7B", "base:adapter", "模型 mit Leerzeichen", "a.*", ">", "$JS.API.x", "a=2Fb"]
)
async def test_any_model_name_works(broker: Broker, model: str) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull(model) as pull:
        await pull.want(1)
        await gateway.submit(b"job", model=model)
        assert (await node.next()).payload == b"job"


async def test_a_cancellation_reaches_every_node(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as first, node_of(broker) as second:
        heard: list[Cancel] = []
        for node in (first, second):
            node.queue.on_cancel(lambda payload: heard.append(decode_cancel(payload)))
        await gateway.queue.cancel(["one", "two"])
        await until(lambda: len(heard) == 2)

        assert [Cancel(("one", "two"))] * 2 == heard


async def test_a_reply_reaches_its_gateway_and_no_other(broker: Broker) -> None:
    async with gateway_of(broker) as first, gateway_of(broker) as second, node_of(broker) as node:
        assert first.queue.reply_to != second.queue.reply_to
        await node.queue.reply(second.queue.reply_to, b"for the second")
        await until(lambda: bool(second.replies))
        await node.queue.reply(first.queue.reply_to, b"for the first")
        await until(lambda: bool(first.replies))

        assert (first.replies, second.replies) == ([b"for the first"], [b"for the second"])


async def test_a_reply_to_all_gateways_reaches_each(broker: Broker) -> None:
    async with gateway_of(broker) as first, gateway_of(broker) as second, node_of(broker) as node:
        await node.queue.reply(ALL_GATEWAYS, b"for all")
        await until(lambda: bool(first.replies) and bool(second.replies))

        assert (first.replies, second.replies) == ([b"for all"], [b"for all"])


async def test_a_reply_to_a_gateway_that_has_gone_is_dropped(broker: Broker) -> None:
    async with node_of(broker) as node:
        async with gateway_of(broker) as gateway:
            address = gateway.queue.reply_to
        await node.queue.reply(address, b"nobody there")


async def test_payloads_up_to_the_limit_pass_and_one_byte_more_is_refused(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(2)
        limit = gateway.queue.payload_bytes_max
        assert limit > 4 * 1024 * 1024
        with pytest.raises(BodyTooLarge):
            await gateway.submit(b"x" * (limit + 1))
        await gateway.submit(b"")
        await (await node.next()).ack()
        await gateway.submit(b"x" * limit)
        assert limit == len((await node.next(2)).payload)

        with pytest.raises(BodyTooLarge):
            await node.queue.reply(gateway.queue.reply_to, b"x" * (node.queue.payload_bytes_max + 1))
        await node.queue.reply(gateway.queue.reply_to, b"x" * node.queue.payload_bytes_max)
        await until(lambda: bool(gateway.replies))


async def test_out_of_reach_is_refused_and_after_the_return_everything_flows_again(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(5)
        await gateway.submit(b"before")
        held = await node.next()
        broker.stop()
        await until(lambda: not gateway.queue.is_connected)
        with pytest.raises(QueueUnavailable):
            await gateway.submit(b"meanwhile")
        with pytest.raises(QueueUnavailable):
            await node.queue.reply(gateway.queue.reply_to, b"")
        with pytest.raises(QueueUnavailable):
            await held.bury("no")
        await held.ack()
        await gateway.queue.cancel(["meanwhile"])
        broker.start()
        await until(lambda: gateway.restored == 1)
        assert gateway.queue.is_connected

        await gateway.submit(b"after")
        await until(lambda: b"after" in node.payloads)
        await node.queue.reply(gateway.queue.reply_to, b"back")
        await until(lambda: gateway.replies == [b"back"])


async def test_bulk_jobs_survive_a_restart(broker: Broker) -> None:
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull(lane="bulk") as pull:
        await gateway.submit(b"kept", lane="bulk")
        await never(lambda: bool(gateway.refused))
        broker.stop()
        await until(lambda: not gateway.queue.is_connected)
        broker.start()
        await until(lambda: gateway.restored == 1)
        await pull.want(1)
        assert (await node.next()).payload == b"kept"


async def test_jobs_past_their_age_are_dropped_and_free_their_room(
    broker_with: Callable[[QueueSettings], Broker],
) -> None:
    broker = broker_with(msgspec.structs.replace(SETTINGS, job_age_max_s=1.0))
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull(lane="bulk") as pull:
        await gateway.submit(b"old" + b"." * 900_000, lane="bulk")
        await never(lambda: bool(gateway.refused), timeout_s=1.5)
        await gateway.submit(b"new" + b"." * 900_000, lane="bulk")
        await pull.want(2)
        assert (await node.next()).payload.startswith(b"new")
        assert gateway.refused == []


async def test_the_oldest_dead_letters_make_room_for_new_ones(
    broker_with: Callable[[QueueSettings], Broker],
) -> None:
    broker = broker_with(msgspec.structs.replace(SETTINGS, dead_bytes_max=300_000))
    async with gateway_of(broker) as gateway, node_of(broker) as node, node.pull() as pull:
        await pull.want(5)
        for number in range(5):
            await gateway.submit(b"%d" % number + b"." * 100_000)
            await (await node.next(number + 1)).bury("reason")
        assert [payload[:1] for _, _, _, payload in await broker.dead_letters()] == [b"3", b"4"]
