"""Errors and jobs as they cross a process: nothing is lost on the way, and a code names exactly one class."""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance import errors
from appliance.errors import ApplianceError, InternalError
from appliance.jobs import (
    Cancel,
    Done,
    Embed,
    Event,
    Failed,
    Job,
    Reply,
    Rows,
    Usage,
    decode_cancel,
    decode_job,
    decode_replies,
    encode_cancel,
    encode_job,
    encode_replies,
)

TREE: Sequence[type[ApplianceError]] = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, ApplianceError) and kind is not ApplianceError
]

texts = st.text(max_size=40)
names = st.text(min_size=1, max_size=20)
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Rows, data=st.binary(max_size=64), width=st.integers(0, 8)),
    st.builds(
        Done,
        usage=st.builds(Usage, input_tokens=st.integers(0, 2**40)),
        truncated=st.lists(st.integers(0, 2048), max_size=5).map(tuple),
    ),
    st.builds(
        Failed,
        code=names,
        message=texts,
        param=st.none() | names,
        retry_after_s=st.none() | st.floats(0, 60),
    ),
)


def test_the_tree_is_complete() -> None:
    assert len(TREE) >= 19
    assert len({kind.code for kind in TREE}) == len(TREE)


@pytest.mark.parametrize("kind", TREE)
def test_an_error_comes_back_as_its_own_class(kind: type[ApplianceError]) -> None:
    sent = kind("what was wrong", param="input[3]", retry_after_s=2.5)
    message = encode_replies([Reply("job", 1, 0, Failed.of(sent))])

    event = decode_replies(message)[0].event
    assert isinstance(event, Failed)
    error = event.error()

    assert type(error) is kind
    assert (str(error), error.message) == ("what was wrong", "what was wrong")
    assert (error.param, error.retry_after_s) == ("input[3]", 2.5)


@pytest.mark.parametrize("kind", TREE)
def test_a_class_says_what_http_needs(kind: type[ApplianceError]) -> None:
    assert 400 <= kind.status < 600
    assert kind.is_retryable == (kind.status in {429, 503})


def test_a_code_of_a_newer_peer_is_our_fault() -> None:
    error = ApplianceError.restore("from_the_future", "m", param=None, retry_after_s=None)

    assert type(error) is InternalError
    assert error.status == 500


@settings(deadline=None, max_examples=40)
@given(
    st.builds(
        Job,
        id=names,
        model=names,
        task=st.builds(
            Embed,
            inputs=st.lists(texts, max_size=4).map(tuple),
            intent=st.sampled_from([None, "query", "document"]),
            width=st.none() | st.integers(1, 4096),
            truncation=st.sampled_from(["end", "start", "none"]),
        ),
        reply_to=names,
        deadline_s=st.floats(0, 4e9),
        lane=st.sampled_from(["interactive", "bulk"]),
        first_index=st.integers(0, 2048),
        traceparent=texts,
        attempt_base=st.integers(0, 10**6),
    )
)
def test_a_job_survives_the_way(job: Job) -> None:
    assert decode_job(encode_job(job)) == job


@settings(deadline=None, max_examples=40)
@given(st.lists(st.builds(Reply, job_id=names, attempt=st.integers(0), seq=st.integers(0), event=events), max_size=5))
def test_replies_survive_the_way(replies: list[Reply]) -> None:
    bounded = [msgspec.structs.replace(r, attempt=r.attempt % 2**32, seq=r.seq % 2**32) for r in replies]

    assert decode_replies(encode_replies(bounded)) == bounded


@settings(deadline=None, max_examples=40)
@given(st.lists(names, max_size=5))
def test_a_cancellation_survives_the_way(job_ids: list[str]) -> None:
    assert decode_cancel(encode_cancel(Cancel(tuple(job_ids)))) == Cancel(tuple(job_ids))


def test_fields_of_a_newer_peer_are_skipped() -> None:
    job = Job(id="j", model="m", task=Embed(inputs=("a",)), reply_to="r", deadline_s=1.0)
    newer = msgspec.msgpack.decode(encode_job(job)) | {"from_the_future": [1, 2]}

    assert decode_job(msgspec.msgpack.encode(newer)) == job


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80",
        b"{}",
        encode_cancel(Cancel(("a",))),
        encode_job(Job(id="j", model="m", task=Embed(inputs=("a",)), reply_to="r", deadline_s=1.0))[:-1],
        msgspec.msgpack.encode(
            {"id": "j", "model": "m", "task": {"type": "dance"}, "reply_to": "r", "deadline_s": 1.0}
        ),
    ],
)
def test_what_is_no_job_is_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_job(payload)
    with pytest.raises(msgspec.DecodeError):
        decode_replies(payload)
