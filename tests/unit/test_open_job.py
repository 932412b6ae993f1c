"""A job on a node: its items, and the replies that its answer is made of."""

import msgspec
import numpy as np
import pytest

from appliance.errors import BadVector
from appliance.jobs import Done, Failed, Rows, Usage
from appliance.workers.open_job import PART_BYTES_MAX
from appliance.workers.read_job import QUERY
from tests.node_parts import RecordedDelivery, item_ms, job_of, open_job_of, reading_of, tokens_of


def test_a_jobs_items_know_their_place() -> None:
    opened = open_job_of(job_of(inputs=("a", "b"), lane="bulk"), arrived_s=7.0)

    items = opened.begin(reading_of([tokens_of(1, 2), tokens_of(3)]), item_ms)

    assert [(item.position, item.tokens, item.arrived_s, item.lane) for item in items] == [
        (0, 2, 7.0, "bulk"),
        (1, 1, 7.0, "bulk"),
    ]
    assert (opened.input_tokens, opened.cost_left_ms) == (3, 3.0)


def test_truncated_inputs_are_named_as_the_client_counts() -> None:
    opened = open_job_of(job_of(inputs=("a", "b", "c"), first_index=256))
    opened.begin(reading_of([tokens_of(1), tokens_of(2, is_truncated=True), tokens_of(3, is_truncated=True)]), item_ms)

    assert opened.truncated == (257, 258)


def test_an_input_of_several_items_is_truncated_once_and_a_query_is_no_input() -> None:
    opened = open_job_of(job_of(inputs=("a", "b"), first_index=4))
    cut = [tokens_of(number, is_truncated=True) for number in range(4)]
    reading = msgspec.structs.replace(reading_of(cut), owners=(QUERY, 1, 1, 0), input_tokens=3)
    opened.begin(reading, item_ms)

    assert (opened.truncated, opened.input_tokens, opened.cost_left_ms) == ((4, 5), 3, 4.0)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_vectors_are_answered_in_input_order(order: tuple[int, ...]) -> None:
    opened = open_job_of(job_of(inputs=("a", "b", "c")))
    opened.begin(reading_of([tokens_of(number) for number in range(3)]), item_ms)

    complete = [
        opened.take(position, memoryview(np.array([position, 5], dtype="<f4").tobytes()), width=2) for position in order
    ]

    assert complete == [False, False, True]
    rows, done = (reply.event for reply in opened.answer())
    assert isinstance(rows, Rows)
    assert np.frombuffer(rows.data, dtype="<f4").tolist() == [0, 5, 1, 5, 2, 5]
    assert done == Done(Usage(3))


def test_one_vector_is_not_taken_twice() -> None:
    opened = open_job_of(job_of(inputs=("a", "b")))
    opened.begin(reading_of([tokens_of(1), tokens_of(2)]), item_ms)
    opened.take(0, memoryview(b"\0" * 8), width=2)

    with pytest.raises(AssertionError, match="twice"):
        opened.take(0, memoryview(b"\0" * 8), width=2)


@pytest.mark.parametrize(
    ("width", "count", "part_bytes_max", "sizes"),
    [
        (2, 1, 16, [8]),
        (2, 2, 16, [16]),
        (2, 3, 16, [16, 8]),
        (2, 4, 23, [16, 16]),
        (8, 3, 16, [32, 32, 32]),  # a vector is never cut
        (384, 256, PART_BYTES_MAX, [384 * 4 * 256]),
        (1024, 256, PART_BYTES_MAX, [PART_BYTES_MAX, PART_BYTES_MAX]),
    ],
)
def test_rows_go_in_parts_of_whole_vectors(width: int, count: int, part_bytes_max: int, sizes: list[int]) -> None:
    opened = open_job_of(job_of(inputs=("a",) * count))
    opened.begin(reading_of([tokens_of(1)] * count), item_ms)
    for position in range(count):
        opened.take(position, memoryview(np.full(width, position, dtype="<f4").tobytes()), width=width)

    *parts, done = opened.answer(part_bytes_max=part_bytes_max)

    rows = [part.event for part in parts if isinstance(part.event, Rows)]
    assert [len(part.data) for part in rows] == sizes
    assert {part.width for part in rows} == {width}
    joined = np.frombuffer(b"".join(part.data for part in rows), dtype="<f4").reshape(count, width)
    np.testing.assert_array_equal(joined[:, 0], np.arange(count))
    assert [reply.seq for reply in (*parts, done)] == list(range(len(sizes) + 1))
    assert isinstance(done.event, Done)


def test_replies_carry_the_attempt_that_outranks_all_before_it() -> None:
    job = job_of(attempt_base=2000)
    opened = open_job_of(job, RecordedDelivery(b"", attempt=3))

    (reply,) = opened.refusal(BadVector("no", param="input[1]"))

    assert (reply.job_id, reply.attempt, reply.seq) == ("job", 2003, 0)
    assert reply.event == Failed("bad_vector", "no", "input[1]", None)
