"""Cutting requests into chunks: all inputs, in order, within every bound."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.compat.chunks import INPUT_OVERHEAD_BYTES, JOB_OVERHEAD_BYTES, chunks
from appliance.errors import BodyTooLarge
from appliance.jobs import Embed, Job, Rerank, encode_job

PAYLOAD_BYTES_MAX = JOB_OVERHEAD_BYTES + 400


def size_bytes(text: str) -> int:
    return INPUT_OVERHEAD_BYTES + len(text.encode())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(min_size=1, max_size=60), min_size=1, max_size=60), st.integers(20, 600), st.integers(1, 12))
def test_chunks_cover_everything_once_within_the_bounds(inputs: list[str], bytes_max: int, inputs_max: int) -> None:
    cut = list(chunks(inputs, bytes_max=bytes_max, inputs_max=inputs_max, payload_bytes_max=PAYLOAD_BYTES_MAX))

    assert [index for span in cut for index in span] == list(range(len(inputs)))
    for span in cut:
        size = sum(size_bytes(inputs[index]) for index in span)
        assert 1 <= len(span) <= inputs_max
        assert len(span) == 1 or size <= bytes_max
        job = Job(
            id="f" * 24 + "-2047",
            model="org/a-model-with-a-name",
            task=Embed(inputs=tuple(inputs[span.start : span.stop]), intent="document", width=65536),
            reply_to="replies." + "f" * 32,
            deadline_s=1e9,
            first_index=2047,
            traceparent="0" * 55,
        )
        assert len(encode_job(job)) <= PAYLOAD_BYTES_MAX


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(30, 100))
def test_chunks_are_no_smaller_than_needed(sizes: list[int], bytes_max: int) -> None:
    inputs = ["x" * size for size in sizes]

    cut = list(chunks(inputs, bytes_max=bytes_max, inputs_max=100, payload_bytes_max=PAYLOAD_BYTES_MAX))

    for span, following in itertools.pairwise(cut):
        size = sum(size_bytes(inputs[index]) for index in span)
        assert size + size_bytes(inputs[following.start]) > bytes_max


@settings(deadline=None, max_examples=40)
@given(st.lists(st.text(min_size=1, max_size=40), min_size=1, max_size=30), st.text(min_size=1, max_size=80))
def test_what_every_chunk_repeats_counts_in_each(documents: list[str], query: str) -> None:
    shared_bytes = size_bytes(query)

    cut = list(
        chunks(
            documents,
            bytes_max=300,
            inputs_max=100,
            payload_bytes_max=PAYLOAD_BYTES_MAX,
            shared_bytes=shared_bytes,
            field="documents",
        )
    )

    assert [index for span in cut for index in span] == list(range(len(documents)))
    for span in cut:
        task = Rerank(query, tuple(documents[span.start : span.stop]), document_tokens_max=4096, truncation="none")
        assert len(span) == 1 or shared_bytes + sum(size_bytes(text) for text in task.documents) <= 300
        job = Job("f" * 24 + "-9999", "org/a-model-with-a-name", task, "replies." + "f" * 32, 1e9, first_index=9999)
        assert len(encode_job(job)) <= PAYLOAD_BYTES_MAX


def test_an_item_that_leaves_no_room_for_what_is_repeated_is_named() -> None:
    cut = chunks(["a"], bytes_max=900, inputs_max=9, payload_bytes_max=1200, shared_bytes=300, field="documents")

    with pytest.raises(BodyTooLarge, match="the queue takes 0 B") as caught:
        list(cut)
    assert caught.value.param == "documents[0]"


def test_an_input_as_large_as_the_queue_takes_is_a_chunk() -> None:
    largest = "x" * (PAYLOAD_BYTES_MAX - JOB_OVERHEAD_BYTES - INPUT_OVERHEAD_BYTES)

    cut = list(chunks(["a", largest, "b"], bytes_max=50, inputs_max=9, payload_bytes_max=PAYLOAD_BYTES_MAX))

    assert cut == [range(1), range(1, 2), range(2, 3)]


@pytest.mark.parametrize("text", ["x" * 396, "é" * 198])
def test_a_larger_input_is_named(text: str) -> None:
    cut = chunks(["a", text], bytes_max=10_000, inputs_max=9, payload_bytes_max=PAYLOAD_BYTES_MAX)

    with pytest.raises(BodyTooLarge, match=r"'input\[1\]' is 401 B") as caught:
        list(cut)
    assert caught.value.param == "input[1]"


def test_nothing_makes_no_chunk() -> None:
    assert list(chunks([], bytes_max=10, inputs_max=1, payload_bytes_max=PAYLOAD_BYTES_MAX)) == []
