"""Settlement: answered first, acknowledged after, exactly once, and per item."""

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from prometheus_client import REGISTRY

from appliance import tally
from appliance.errors import BadVector, DeadlinePassed, EngineFailed, QueueUnavailable
from appliance.jobs import CANARY_PREFIX, Beat, Done, Failed, Part, Reply, Rows, Text, TokenRows, Usage, encode_replies
from appliance.workers import ledger
from appliance.workers.ledger import REPLIES_BYTES_MAX, Ledger, messages
from appliance.workers.open_job import Item
from appliance.workers.read_job import QUERY, Reading
from appliance.workers.wire import Encoded
from tests.node_parts import RecordedDelivery, RecordingNodeQueue, encoded_of, item_ms, job_of, reading_of, tokens_of


class Bench:
    """A ledger on a recording queue. `work` is what remains per model: it must come to 0."""

    def __init__(self, *, payload_bytes_max: int = 1_000_000) -> None:
        self.queue = RecordingNodeQueue(payload_bytes_max=payload_bytes_max)
        self.work: dict[str, float] = {"m": 0.0}
        self.ledger = Ledger(self.queue, on_work_done=self._done)
        self.deliveries: dict[str, RecordedDelivery] = {}

    def _done(self, model: str, work_ms: float) -> None:
        self.work[model] -= work_ms

    def open(
        self,
        job_id: str,
        *ids: int,
        first_index: int = 0,
        deadline_s: float = 4e9,
        reply_to: str = "replies.g",
        attempt: int = 1,
    ) -> list[Item]:
        """Open a job of one input per id, and begin it."""
        job = job_of(job_id, ["text"] * len(ids), first_index=first_index, deadline_s=deadline_s, reply_to=reply_to)
        delivery = RecordedDelivery(b"", attempt=attempt, trail=self.queue.trail)
        self.deliveries[job_id] = delivery
        opened = self.ledger.open(job, delivery)
        items = opened.begin(reading_of([tokens_of(number) for number in ids]), item_ms)
        self.work["m"] += opened.cost_left_ms
        return items

    def settled(self, job_id: str) -> list[str]:
        return self.deliveries[job_id].settlements

    def failures(self) -> dict[str, Failed]:
        return {reply.job_id: reply.event for reply in self.queue.replies if isinstance(reply.event, Failed)}

    def assert_nothing_is_left(self) -> None:
        assert len(self.ledger) == 0
        assert self.work["m"] == 0


async def test_a_job_is_answered_and_then_acknowledged() -> None:
    bench = Bench()
    items = bench.open("a", 1, 2)

    await bench.ledger.take(items, encoded_of(1.0, 2.0))

    assert bench.queue.trail == ["reply", "ack"]
    assert [type(reply.event) for reply in bench.queue.replies] == [Rows, Done]
    bench.assert_nothing_is_left()


async def test_a_job_spread_over_batches_is_answered_once() -> None:
    bench = Bench()
    first, second = bench.open("a", 1, 2)

    await bench.ledger.take([second], encoded_of(2.0))
    assert (bench.queue.trail, bench.work["m"], len(bench.ledger)) == ([], 1, 1)
    await bench.ledger.take([first], encoded_of(1.0))

    rows = bench.queue.replies[0].event
    assert isinstance(rows, Rows)
    assert rows.data == bytes(encoded_of(1.0, 2.0).rows)
    assert bench.settled("a") == ["ack"]
    bench.assert_nothing_is_left()


async def test_jobs_of_one_gateway_are_answered_in_one_message() -> None:
    bench = Bench()
    items = [*bench.open("a", 1), *bench.open("b", 2), *bench.open("c", 3, reply_to="replies.other")]

    await bench.ledger.take(items, encoded_of(1.0, 2.0, 3.0))

    assert [(to, [reply.job_id for reply in replies]) for to, replies in bench.queue.sent] == [
        ("replies.g", ["a", "a", "b", "b"]),
        ("replies.other", ["c", "c"]),
    ]
    assert all(bench.settled(job_id) == ["ack"] for job_id in "abc")


async def test_an_answer_that_is_not_sent_leaves_its_job_to_be_delivered_again() -> None:
    bench = Bench()
    items = bench.open("a", 1)
    bench.queue.refusal = QueueUnavailable("away")

    await bench.ledger.take(items, encoded_of(1.0))
    await bench.ledger.extend(age_s=0.0)
    await bench.ledger.give_back_all()

    assert bench.settled("a") == []
    bench.assert_nothing_is_left()


async def test_a_bad_vector_fails_its_own_job_and_names_the_input() -> None:
    bench = Bench()
    items = [*bench.open("a", 1, 2, first_index=256), *bench.open("b", 3)]

    await bench.ledger.take(items, encoded_of(1.0, 2.0, 3.0, bad=(1,)))

    failed = bench.failures()
    assert list(failed) == ["a"]
    assert (failed["a"].code, failed["a"].param) == (BadVector.code, "input[257]")
    assert failed["a"].message.startswith("input[257]: ")
    assert [reply.job_id for reply in bench.queue.replies if isinstance(reply.event, Done)] == ["b"]
    assert (bench.settled("a"), bench.settled("b")) == (["ack"], ["ack"])
    bench.assert_nothing_is_left()


async def test_two_bad_vectors_of_one_job_are_one_failure() -> None:
    bench = Bench()
    items = bench.open("a", 1, 2, 3)

    await bench.ledger.take(items, encoded_of(1.0, 2.0, 3.0, bad=(0, 2)))

    assert len(bench.queue.replies) == 1
    assert bench.failures()["a"].param == "input[0]"
    bench.assert_nothing_is_left()


@pytest.mark.parametrize(("count", "width"), [(1, 2), (3, 2), (0, 2), (2, 0)])
async def test_a_batch_of_another_size_is_nobodys_answer(count: int, width: int) -> None:
    bench = Bench()
    items = [*bench.open("a", 1), *bench.open("b", 2)]

    await bench.ledger.take(items, encoded_of(*[1.0] * count, width=width))

    assert {failed.code for failed in bench.failures().values()} == {BadVector.code}
    assert set(bench.failures()) == {"a", "b"}
    bench.assert_nothing_is_left()


def rows_of(encoded: Encoded, *counts: int) -> Encoded:
    return msgspec.structs.replace(encoded, counts=counts)


def items_read_as(bench: Bench, reading: Reading, *, first_index: int = 0) -> list[Item]:
    """The items of a job that is read as `reading`."""
    opened = bench.ledger.open(job_of("a", ["text"], first_index=first_index), RecordedDelivery(b""))
    items = opened.begin(reading, item_ms)
    bench.work["m"] += opened.cost_left_ms
    return items


async def test_rows_are_cut_by_the_counts_of_their_items() -> None:
    bench = Bench()
    taken: list[list[int]] = []

    def answer(buffers: Sequence[memoryview], width: int, bytes_max: int) -> list[Part]:
        taken.extend([int(row) for row in np.frombuffer(buffer, "<f4")[::width]] for buffer in buffers)
        return []

    contents = [
        tokens_of(1, 2),
        msgspec.structs.replace(tokens_of(3, 4, 5), rows="per_token"),
        msgspec.structs.replace(tokens_of(6), rows="any"),
        msgspec.structs.replace(tokens_of(7), rows="any"),
    ]
    items = items_read_as(bench, Reading(contents, answer))

    await bench.ledger.take(items, rows_of(encoded_of(1, 2, 3, 4, 5, 6), 1, 3, 0, 2))

    assert taken == [[1], [2, 3, 4], [], [5, 6]]
    assert [type(reply.event) for reply in bench.queue.replies] == [Done]
    bench.assert_nothing_is_left()


@pytest.mark.parametrize("counts", [(), (1,), (2, 1), (1, 3), (1, 1, 1), (3, -1)])
async def test_rows_of_other_counts_than_asked_for_are_nobodys_answer(counts: tuple[int, ...]) -> None:
    bench = Bench()
    contents = [tokens_of(1, 2), msgspec.structs.replace(tokens_of(3, 4), rows="per_token")]
    items = items_read_as(bench, reading_of(contents))

    await bench.ledger.take(items, rows_of(encoded_of(*[1.0] * (sum(counts) or 2)), *counts))

    assert bench.failures()["a"].code == BadVector.code
    bench.assert_nothing_is_left()


@pytest.mark.parametrize(("bad", "name"), [(0, "query"), (1, "input[10]"), (2, "input[10]"), (3, "input[11]")])
async def test_a_bad_vector_names_the_input_that_its_item_is_of(bad: int, name: str) -> None:
    bench = Bench()
    contents = [tokens_of(number) for number in range(4)]
    reading = msgspec.structs.replace(reading_of(contents), owners=(QUERY, 0, 0, 1))
    items = items_read_as(bench, reading, first_index=10)

    await bench.ledger.take(items, encoded_of(1.0, 2.0, 3.0, 4.0, bad=(bad,)))

    assert bench.failures()["a"].param == name
    bench.assert_nothing_is_left()


async def test_numbers_that_make_no_answer_fail_their_job_and_no_other() -> None:
    bench = Bench()

    def answer(buffers: Sequence[memoryview], width: int, bytes_max: int) -> list[Part]:
        raise BadVector("input[0]: the pieces cancel each other", param="input[0]")

    items = [*items_read_as(bench, Reading([tokens_of(1)], answer)), *bench.open("b", 2)]

    await bench.ledger.take(items, encoded_of(1.0, 2.0))

    assert list(bench.failures()) == ["a"]
    assert [reply.job_id for reply in bench.queue.replies if isinstance(reply.event, Done)] == ["b"]
    bench.assert_nothing_is_left()


@pytest.mark.parametrize(("size", "code"), [(1700, ""), (2000, "request_too_large")])
async def test_an_answer_that_no_message_can_carry_is_refused(size: int, code: str) -> None:
    bench = Bench(payload_bytes_max=2000)
    big = Reading([tokens_of(1)], lambda buffers, width, bytes_max: [TokenRows((b"\0" * size,), 4)])
    items = [*items_read_as(bench, big), *bench.open("b", 2)]

    await bench.ledger.take(items, encoded_of(1.0, 2.0))

    assert [failed.code for failed in bench.failures().values()] == ([code] if code else [])
    assert max(bench.queue.sizes) <= 2000
    assert bench.settled("b") == ["ack"]
    bench.assert_nothing_is_left()


async def test_a_job_without_items_is_answered_at_once() -> None:
    bench = Bench()
    delivery = RecordedDelivery(b"")
    opened = bench.ledger.open(job_of("a"), delivery)

    await bench.ledger.answer(opened, Reading([], lambda *_: [Text("hello")], input_tokens=2))

    assert [reply.event for reply in bench.queue.replies] == [Text("hello"), Done(Usage(2))]
    assert delivery.settlements == ["ack"]
    bench.assert_nothing_is_left()


async def test_an_item_at_fault_is_named_and_its_job_settled_once() -> None:
    bench = Bench()
    first, second = bench.open("a", 1, 2, first_index=10)

    await bench.ledger.fail(second, EngineFailed("it cannot be computed"))
    await bench.ledger.fail(first, EngineFailed("nor can it"))
    await bench.ledger.take([first], encoded_of(1.0))

    assert bench.failures()["a"] == Failed("engine_failed", "input[11]: it cannot be computed", "input[11]", None)
    assert bench.queue.trail == ["reply", "ack"]
    bench.assert_nothing_is_left()


async def test_a_cancelled_job_is_dropped_in_silence() -> None:
    bench = Bench()
    items = bench.open("a", 1, 2)
    assert bench.ledger.is_live(items[0])
    bench.ledger.cancelled.add(["a"])

    assert not bench.ledger.is_live(items[0])
    await bench.ledger.drop(items)

    assert bench.queue.trail == ["ack"]
    bench.assert_nothing_is_left()


async def test_a_late_job_is_told_so() -> None:
    bench = Bench()
    items = bench.open("a", 1, 2, deadline_s=time.time() - 1)

    assert not bench.ledger.is_live(items[0])
    await bench.ledger.drop(items)

    assert bench.failures()["a"].code == DeadlinePassed.code
    assert bench.queue.trail == ["reply", "ack"]
    bench.assert_nothing_is_left()


async def test_a_settled_job_is_not_live() -> None:
    bench = Bench()
    (item,) = bench.open("a", 1)
    await bench.ledger.take([item], encoded_of(1.0))

    assert not bench.ledger.is_live(item)
    await bench.ledger.drop([item])
    assert bench.settled("a") == ["ack"]


async def test_a_buried_job_is_told_after_it_lies() -> None:
    bench = Bench()
    (item,) = bench.open("a", 1)

    await bench.ledger.bury(item.owner, "3 deliveries did not finish it")

    assert bench.queue.trail == ["bury: job a: 3 deliveries did not finish it", "reply"]
    assert bench.failures()["a"].code == "undeliverable"
    assert "3 deliveries" in bench.failures()["a"].message
    bench.assert_nothing_is_left()


async def test_a_job_that_cannot_be_buried_now_is_left_for_later() -> None:
    bench = Bench()
    (item,) = bench.open("a", 1)
    bench.deliveries["a"].burial_fault = QueueUnavailable("away")

    await bench.ledger.bury(item.owner, "3 deliveries did not finish it")

    assert bench.queue.trail == []
    bench.assert_nothing_is_left()


async def test_the_same_job_open_twice_is_settled_twice() -> None:
    bench = Bench()
    (first,) = bench.open("a", 1)
    early = bench.deliveries["a"]
    (second,) = bench.open("a", 1, attempt=2)

    await bench.ledger.take([first, second], encoded_of(1.0, 1.0))

    assert (early.settlements, bench.settled("a")) == (["ack"], ["ack"])
    assert [reply.attempt for reply in bench.queue.replies] == [1, 1, 2, 2]
    bench.assert_nothing_is_left()


async def test_open_jobs_are_extended_until_they_are_settled() -> None:
    bench = Bench()
    (item,) = bench.open("a", 1)

    await bench.ledger.extend(age_s=1000.0)
    assert bench.settled("a") == []
    await bench.ledger.extend(age_s=0.0)
    await bench.ledger.take([item], encoded_of(1.0))
    await bench.ledger.extend(age_s=0.0)

    assert bench.settled("a") == ["extend", "ack"]


async def test_a_node_that_stops_gives_its_jobs_back() -> None:
    bench = Bench()
    done, kept = [bench.open(job_id, 1)[0] for job_id in ("a", "b")]
    await bench.ledger.take([done], encoded_of(1.0))

    await bench.ledger.give_back_all()
    await bench.ledger.take([kept], encoded_of(1.0))  # of a batch that was under way

    assert (bench.settled("a"), bench.settled("b")) == (["ack"], ["give back"])
    assert {reply.job_id for reply in bench.queue.replies} == {"a"}
    bench.assert_nothing_is_left()


async def test_answers_fit_what_the_server_takes() -> None:
    bench = Bench(payload_bytes_max=2000)
    items = [*bench.open("a", *range(400)), *bench.open("b", 1)]

    await bench.ledger.take(items, encoded_of(*[1.0] * 401))

    assert max(bench.queue.sizes) <= 2000
    assert len(bench.queue.sizes) > 1
    assert (bench.settled("a"), bench.settled("b")) == (["ack"], ["ack"])


def rows(size: int, number: int = 0) -> Reply:
    return Reply("j", 1, number, Rows(b"\0" * size, 1))


@pytest.mark.parametrize(
    ("replies", "sizes"),
    [
        ([], [0]),
        ([rows(10)], [1]),
        ([rows(10), rows(10)], [2]),
        ([rows(400_000), rows(380_000)], [2]),
        ([rows(400_000), rows(400_000)], [1, 1]),
        ([rows(REPLIES_BYTES_MAX * 2), rows(10)], [1, 1]),
        ([rows(10), rows(REPLIES_BYTES_MAX * 2)], [1, 1]),
    ],
)
def test_replies_are_packed_up_to_the_limit(replies: list[Reply], sizes: list[int]) -> None:
    packed = messages(replies)

    assert [len(message) for message in packed] == sizes
    assert [reply for message in packed for reply in message] == replies


def test_long_messages_and_long_lists_count() -> None:
    long = [
        Reply("j" * 40, 1, 0, Failed("invalid_value", "x" * 5000)),
        Reply("j" * 40, 1, 0, Done(truncated=tuple(range(70_000, 72_000)))),
    ]

    packed = messages([*long, *long], bytes_max=12_000)

    assert [len(message) for message in packed] == [1, 1, 1, 1]
    assert all(len(encode_replies(message)) <= 12_000 for message in packed)


def ended(outcome: str) -> float:
    tally.flush()
    return REGISTRY.get_sample_value("appliance_jobs_total", {"model": "m", "outcome": outcome}) or 0.0


async def test_a_stream_is_settled_when_it_begins_and_counted_when_it_ends() -> None:
    bench = Bench()
    (item,) = bench.open("a", 1)
    done, cancelled = ended("done"), ended("cancelled")

    await bench.ledger.acknowledge(item.owner)
    assert bench.settled("a") == ["ack"]
    bench.assert_nothing_is_left()
    assert ended("done") == done

    bench.ledger.ended(item.owner, outcome="done")
    bench.ledger.ended(item.owner, outcome="cancelled")
    bench.ledger.forget(item.owner, outcome="cancelled")
    assert (ended("done") - done, ended("cancelled") - cancelled) == (1, 0), "once, as it ended first"


async def test_canaries_are_answered_and_not_counted() -> None:
    bench = Bench()
    done, late = ended("done"), ended(DeadlinePassed.code)
    answered = bench.open(f"{CANARY_PREFIX}a", 1)
    dropped = bench.open(f"{CANARY_PREFIX}b", 1, deadline_s=1.0)

    await bench.ledger.take(answered, encoded_of(1.0))
    await bench.ledger.drop(dropped)

    assert [bench.settled(f"{CANARY_PREFIX}{name}") for name in "ab"] == [["ack"], ["ack"]]
    assert (ended("done"), ended(DeadlinePassed.code)) == (done, late)
    bench.assert_nothing_is_left()


async def test_all_gateways_hear_what_answers_one_of_them_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    await bench.ledger.refuse(bench.open("a", 1)[0].owner, EngineFailed("it does not work"))
    assert bench.queue.announced == []

    for job_id in ("b", "c"):
        await bench.ledger.take(bench.open(job_id, 1), encoded_of(1.0))
    assert bench.queue.announced == [Beat("m")], "not with every answer"

    monkeypatch.setattr(ledger, "ANNOUNCE_S", 0.0)
    await bench.ledger.take(bench.open("d", 1), encoded_of(1.0))
    assert bench.queue.announced == [Beat("m")] * 2
