"""Subject and consumer names from any model name."""

import re
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.jobs import Lane
from appliance.queue.subjects import consumer_name, dead_subject, escape, job_subject, stream_name, unescape

NAMES = st.text(min_size=1, max_size=300)
LANES: tuple[Lane, ...] = get_args(Lane)


@given(NAMES)
def test_a_name_comes_back_from_its_token(name: str) -> None:
    assert unescape(escape(name)) == name


@given(NAMES)
def test_a_token_is_valid_everywhere(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", escape(name))


@given(NAMES, NAMES)
def test_different_names_have_different_tokens_and_consumers(one: str, other: str) -> None:
    assert (one == other) == (escape(one) == escape(other))
    assert (one == other) == (consumer_name("bulk", one) == consumer_name("bulk", other))


@given(NAMES, st.sampled_from(LANES))
def test_subjects_have_three_tokens_and_consumers_fit_into_nats(name: str, lane: Lane) -> None:
    assert len(job_subject(lane, name).split(".")) == 3
    assert len(dead_subject(lane, name).split(".")) == 3
    assert re.fullmatch(r"[A-Za-z0-9_=-]{1,255}", consumer_name(lane, name))


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("BAAI/bge-m3", "BAAI=2Fbge-m3"),
        ("Qwen2.5-7B", "Qwen2=2E5-7B"),
        ("base:adapter", "base=3Aadapter"),
        ("a=2Fb", "a=3D2Fb"),
        ("ü", "=C3=BC"),
        ("plain_Name-1", "plain_Name-1"),
    ],
)
def test_known_tokens(name: str, token: str) -> None:
    assert escape(name) == token


def test_names_that_share_a_long_beginning_have_different_consumers() -> None:
    assert consumer_name("bulk", "x" * 300 + "a") != consumer_name("bulk", "x" * 300 + "b")


def test_every_lane_has_a_stream_of_its_own() -> None:
    assert [stream_name(lane) for lane in LANES] == ["JOBS_INTERACTIVE", "JOBS_BULK"]
