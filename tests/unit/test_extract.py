"""Extraction over HTTP: a golden answer, refusals in OpenAI's words, and never a 5xx."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.compat import extract
from appliance.jobs import Extract, Failed, Span, Spans
from appliance.settings import AliasSettings
from tests.gateway_parts import Gateway

MODEL = "org/finder"


@pytest.fixture
async def gateway() -> Gateway:
    return Gateway(aliases=(AliasSettings(name="strict", model=MODEL, too_long="error"),))


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway.client() as client:
        yield client


def body_of(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "input": "say Ada", **fields}


def task_of(gateway: Gateway) -> Extract:
    (job,) = gateway.queue.jobs
    assert isinstance(job.task, Extract)
    return job.task


async def test_entities_come_with_their_place_in_the_text(client: httpx.AsyncClient) -> None:
    texts = ["say Ada", "nothing", "🙂 for Öl and Grace", "b", "c"]

    answer = await client.post("/v1/extract", json=body_of(input=texts))

    assert answer.status_code == 200
    assert answer.json() == {
        "object": "list",
        "data": [
            {
                "object": "extraction",
                "index": 0,
                "entities": [{"start": 4, "end": 7, "text": "Ada", "label": "PERSON", "score": 0.875}],
            },
            {"object": "extraction", "index": 1, "entities": []},
            {
                "object": "extraction",
                "index": 2,
                "entities": [
                    {"start": 6, "end": 8, "text": "Öl", "label": "PERSON", "score": 0.875},
                    {"start": 13, "end": 18, "text": "Grace", "label": "PERSON", "score": 0.875},
                ],
            },
            {"object": "extraction", "index": 3, "entities": []},
            {"object": "extraction", "index": 4, "entities": []},
        ],
        "model": MODEL,
        "usage": {"prompt_tokens": 50, "total_tokens": 50},
    }


async def test_one_text_is_one_object(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/extract", json=body_of())

    assert [one["index"] for one in answer.json()["data"]] == [0]


@pytest.mark.parametrize(
    ("fields", "task"),
    [
        ({}, Extract(("say Ada",))),
        ({"labels": None, "score_min": None, "truncate": None, "user": "u"}, Extract(("say Ada",))),
        ({"labels": ["PERSON", "ORG"], "score_min": 0.25}, Extract(("say Ada",), ("PERSON", "ORG"), 0.25)),
        ({"truncate": "NONE"}, Extract(("say Ada",), truncation="none")),
        ({"truncate": "START"}, Extract(("say Ada",), truncation="start")),
        ({"model": "strict"}, Extract(("say Ada",), truncation="none")),
        ({"model": "strict", "truncate": "END"}, Extract(("say Ada",))),
    ],
)
async def test_what_is_asked_reaches_the_node(
    gateway: Gateway, client: httpx.AsyncClient, fields: dict[str, object], task: Extract
) -> None:
    answer = await client.post("/v1/extract", json=body_of(**fields))

    assert answer.status_code == 200
    assert task_of(gateway) == task


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"input": ""}, (400, "invalid_value", "input")),
        ({"input": []}, (400, "invalid_value", "input")),
        ({"input": ["a", ""]}, (400, "invalid_value", "input[1]")),
        ({"input": ["a"] * 2049}, (400, "invalid_value", "input")),
        ({"input": [1]}, (400, "invalid_value", "input[0]")),
        ({"input": None}, (400, "invalid_value", "input")),
        ({"labels": []}, (400, "invalid_value", "labels")),
        ({"labels": ["a"] * 101}, (400, "invalid_value", "labels")),
        ({"labels": ["a", ""]}, (400, "invalid_value", "labels[1]")),
        ({"labels": ["a" * 129]}, (400, "invalid_value", "labels[0]")),
        ({"score_min": -0.1}, (400, "invalid_value", "score_min")),
        ({"score_min": 1.1}, (400, "invalid_value", "score_min")),
        ({"truncate": "end"}, (400, "invalid_value", "truncate")),
        ({"model": "nothing"}, (404, "model_not_found", "model")),
        ({"model": "org/embedder"}, (400, "invalid_value", "model")),
    ],
)
async def test_a_wrong_request_is_refused(
    gateway: Gateway, client: httpx.AsyncClient, fields: dict[str, object], refusal: tuple[int, str, str]
) -> None:
    answer = await client.post("/v1/extract", json=body_of(**fields))

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == refusal
    assert gateway.queue.jobs == []


async def test_a_label_that_the_model_does_not_find_is_told(gateway: Gateway, client: httpx.AsyncClient) -> None:
    gateway.queue.failure = Failed("invalid_value", "'labels' has 'X', which the model does not find", "labels")

    answer = await client.post("/v1/extract", json=body_of(labels=["X"]))

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "labels")


@pytest.mark.parametrize(
    "span", [Span(-1, 2, "A", 0.5), Span(3, 2, "A", 0.5), Span(0, 8, "A", 0.5), Span(0, 1, "A", float("nan"))]
)
async def test_a_span_outside_of_its_text_is_never_an_answer(
    gateway: Gateway, client: httpx.AsyncClient, span: Span
) -> None:
    gateway.queue.parts = [Spans(((span,),))]

    answer = await client.post("/v1/extract", json=body_of())

    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "bad_vector")


async def test_what_was_done_to_the_request_is_said(gateway: Gateway, client: httpx.AsyncClient) -> None:
    gateway.queue.truncated = (0,)

    answer = await client.post("/v1/extract", json=body_of(zebra=1))

    assert answer.headers["x-appliance-ignored"] == "zebra"
    assert answer.headers["x-appliance-truncated"] == "0"


async def test_msgpack_comes_and_goes(client: httpx.AsyncClient) -> None:
    kind = "application/msgpack"
    answer = await client.post(
        "/v1/extract", content=msgspec.msgpack.encode(body_of()), headers={"content-type": kind, "accept": kind}
    )

    assert answer.headers["content-type"] == kind
    found = msgspec.msgpack.decode(answer.content, type=extract.ExtractAnswer)
    assert found.data[0].entities == [extract.Entity(4, 7, "Ada", "PERSON", 0.875)]


VALUES = st.none() | st.booleans() | st.floats(allow_nan=False) | st.text(max_size=5) | st.lists(st.text(max_size=5))
OPTIONAL = [name for name in (*extract.ExtractBody.__struct_fields__, "zebra") if name not in {"model", "input"}]
FIELDS = st.fixed_dictionaries(
    {"model": st.just(MODEL), "input": st.text(max_size=9) | st.lists(st.text(max_size=9), max_size=7)},
    optional=dict.fromkeys(OPTIONAL, VALUES),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(FIELDS)
def test_whatever_is_sent_is_read_or_refused(fields: dict[str, Any]) -> None:
    async def ask() -> None:
        async with Gateway().client() as client:
            answer = await client.post("/v1/extract", content=json.dumps(fields))
        assert answer.status_code in {200, 400}, answer.content
        if answer.status_code == 200:
            texts = [fields["input"]] if isinstance(fields["input"], str) else fields["input"]
            for text, one in zip(texts, answer.json()["data"], strict=True):
                assert all(text[each["start"] : each["end"]] == each["text"] for each in one["entities"])

    asyncio.run(ask())
