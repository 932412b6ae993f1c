"""Reranking over HTTP, in the dialects of Cohere, Jina and Voyage: golden answers, refusals, and never a 5xx."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.compat import rerank
from appliance.errors import InvalidRequest
from appliance.jobs import Failed, Rerank, Scores
from appliance.settings import AliasSettings
from tests.gateway_parts import TOKENS_OF_AN_INPUT, Gateway

MODEL = "org/ranker"
PATHS = ["/v1/rerank", "/v2/rerank", "/rerank"]


@pytest.fixture
async def gateway() -> Gateway:
    return Gateway(aliases=(AliasSettings(name="strict", model=MODEL, too_long="error"),))


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway.client() as client:
        yield client


def task_of(gateway: Gateway) -> Rerank:
    (job,) = gateway.queue.jobs
    assert isinstance(job.task, Rerank)
    return job.task


def body_of(**fields: object) -> dict[str, object]:
    return {"model": MODEL, "query": "q", "documents": ["0.25", "0.75", "0.5"], **fields}


@pytest.mark.parametrize(("path", "version"), [("/v1/rerank", "1"), ("/rerank", "1"), ("/v2/rerank", "2")])
async def test_the_answer_is_coheres_with_jinas_fields_beside(
    client: httpx.AsyncClient, path: str, version: str
) -> None:
    answer = await client.post(path, json=body_of(model="rerank-v3.5"))

    assert answer.status_code == 200
    found = answer.json()
    assert len(found.pop("id")) == 36
    assert found == {
        "results": [
            {"index": 1, "relevance_score": 0.75},
            {"index": 2, "relevance_score": 0.5},
            {"index": 0, "relevance_score": 0.25},
        ],
        "meta": {"api_version": {"version": version}, "billed_units": {"search_units": 1}},
        "model": "rerank-v3.5",
        "usage": {"total_tokens": 30, "prompt_tokens": 30},
    }
    assert not [name for name in answer.headers if name.startswith("x-appliance")]


@pytest.mark.parametrize("fields", [{"model": None}, {}])
async def test_without_a_name_the_first_model_that_reranks_answers(
    gateway: Gateway, client: httpx.AsyncClient, fields: dict[str, object]
) -> None:
    answer = await client.post("/v1/rerank", json={"query": "q", "documents": ["0.5"], **fields})

    assert answer.json()["model"] == MODEL
    assert [job.model for job in gateway.queue.jobs] == [MODEL]


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"truncation": True, "top_n": 2}])
async def test_a_voyage_request_gets_voyages_fields_too(client: httpx.AsyncClient, fields: dict[str, object]) -> None:
    answer = await client.post("/v1/rerank", json=body_of(**fields, return_documents=True))

    found = answer.json()
    assert found["object"] == "list"
    assert found["data"] == [
        {"index": 1, "relevance_score": 0.75, "document": "0.75"},
        {"index": 2, "relevance_score": 0.5, "document": "0.5"},
    ]
    assert found["results"][0] == {"index": 1, "relevance_score": 0.75, "document": {"text": "0.75"}}
    assert found["usage"]["total_tokens"] == 30


async def test_many_documents_are_chunks_of_one_ranking(gateway: Gateway, client: httpx.AsyncClient) -> None:
    documents = [f"0.{number}" for number in (11, 99, 35, 99, 42, 11, 77)]

    answer = await client.post("/v1/rerank", json=body_of(documents=documents))

    assert [one["index"] for one in answer.json()["results"]] == [1, 3, 6, 4, 2, 0, 5]
    tasks = [job.task for job in gateway.queue.jobs if isinstance(job.task, Rerank)]
    assert [len(task.documents) for task in tasks] == [3, 3, 1]
    assert {task.query for task in tasks} == {"q"}
    assert [job.first_index for job in gateway.queue.jobs] == [0, 3, 6]


@pytest.mark.parametrize(("top_n", "count"), [(1, 1), (2, 2), (3, 3), (4, 3), (10**30, 3), (None, 3)])
@pytest.mark.parametrize("name", ["top_n", "top_k"])
async def test_no_more_come_back_than_asked_for(
    client: httpx.AsyncClient, name: str, top_n: int | None, count: int
) -> None:
    answer = await client.post("/v1/rerank", json=body_of(**{name: top_n}))

    assert len(answer.json()["results"]) == count


@pytest.mark.parametrize("path", PATHS)
async def test_documents_come_back_as_they_were_sent(client: httpx.AsyncClient, path: str) -> None:
    documents = ["0.9", {"text": "0.8", "id": 7, "tag": None}, {"text": "0.7"}]

    answer = await client.post(path, json=body_of(documents=documents, return_documents=True))

    assert [one["document"] for one in answer.json()["results"]] == [{"text": "0.9"}, documents[1], documents[2]]


@pytest.mark.parametrize(
    ("document", "rank_fields", "text"),
    [
        ("plain", None, "plain"),
        ("plain", ["title"], "plain"),
        ("", None, ""),
        ({"text": "a", "title": "b"}, None, "a"),
        ({"text": "a", "title": "b"}, ["title", "text"], "b\na"),
        ({"text": "a", "title": "b"}, ["title"], "b"),
        ({"text": "a"}, ["title", "text"], "a"),
        ({"text": "a", "title": None}, ["title", "text"], "a"),
        ({"year": 1999, "good": True, "share": 0.5}, ["good", "year", "share"], "true\n1999\n0.5"),
    ],
)
async def test_what_is_ranked_of_a_document(
    gateway: Gateway, client: httpx.AsyncClient, document: object, rank_fields: list[str] | None, text: str
) -> None:
    answer = await client.post("/v1/rerank", json=body_of(documents=[document], rank_fields=rank_fields))

    assert answer.status_code == 200
    assert task_of(gateway).documents == (text,)


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        ("/v1/rerank", {}, (None, "end")),
        ("/v2/rerank", {}, (4096, "end")),
        ("/v2/rerank", {"max_tokens_per_doc": 100}, (100, "end")),
        ("/rerank", {"max_tokens_per_doc": 100}, (100, "end")),
        ("/v2/rerank", {"max_tokens_per_doc": 10**30}, (2**31 - 1, "end")),
        ("/v1/rerank", {"truncation": False}, (None, "none")),
        ("/v1/rerank", {"truncation": True}, (None, "end")),
        ("/v1/rerank", {"model": "strict"}, (None, "none")),
        ("/v1/rerank", {"model": "strict", "truncation": True}, (None, "end")),
    ],
)
async def test_how_long_a_document_may_be(
    gateway: Gateway,
    client: httpx.AsyncClient,
    path: str,
    fields: dict[str, object],
    expected: tuple[int | None, str],
) -> None:
    answer = await client.post(path, json=body_of(**fields))

    assert answer.status_code == 200
    task = task_of(gateway)
    assert (task.document_tokens_max, task.truncation) == expected


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"query": ""}, (400, "'query' is empty; send some text")),
        ({"query": " \n"}, (400, "'query' is empty; send some text")),
        ({"query": None}, (400, "'query' must be a string, not null")),
        ({"query": "x" * 65_537}, (400, "'query' is 65537 B of text, the limit is 65536 B")),
        ({"documents": []}, (400, "'documents' has 0 documents; it must have between 1 and 10000")),
        ({"documents": ["x"] * 10_001}, (400, "'documents' has 10001 documents; it must have between 1 and 10000")),
        ({"documents": "text"}, (400, "'documents' must be an array, not a string")),
        ({"documents": ["a", {"title": "b"}]}, (400, "'documents[1]' has no 'text'")),
        ({"documents": [{"image": "aGk="}]}, (400, "'documents[0]' has no 'text'")),
        ({"documents": [{"text": "a"}], "rank_fields": ["x", "y"]}, (400, "'documents[0]' has no 'x', 'y'")),
        ({"rank_fields": []}, (400, "'rank_fields' is empty; name a field of the documents or leave it out")),
        ({"top_n": 0}, (400, "'top_n' is 0; it must be at least 1")),
        ({"top_n": -1}, (400, "'top_n' is -1; it must be at least 1")),
        ({"top_k": 0}, (400, "'top_k' is 0; it must be at least 1")),
        ({"top_n": 1, "top_k": 2}, (400, "'top_n' is 1 and 'top_k' is 2; send one")),
        ({"max_tokens_per_doc": 0}, (400, "'max_tokens_per_doc' is 0; it must be at least 1")),
        ({"max_chunks_per_doc": 0}, (400, "'max_chunks_per_doc' is 0; it must be at least 1")),
        (
            {"instruction": "be nice"},
            (400, "'instruction' is not served; put it into the query if the model was trained so"),
        ),
        ({"return_embeddings": True}, (400, "'return_embeddings' is not served; ask /v1/embeddings for them")),
        ({"model": "nothing"}, (404, None)),
        (
            {"model": "org/embedder"},
            (400, "the model 'org/embedder' does not rerank; it serves /v1/embeddings, see GET /v1/models"),
        ),
    ],
)
async def test_a_wrong_request_is_refused_in_coheres_words(
    gateway: Gateway, client: httpx.AsyncClient, path: str, fields: dict[str, object], refusal: tuple[int, str | None]
) -> None:
    answer = await client.post(path, json=body_of(**fields))

    status, message = refusal
    assert answer.status_code == status
    assert set(answer.json()) == {"message"}
    assert answer.json()["message"].removeprefix("model: ") == message or message is None
    assert gateway.queue.jobs == []


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model":"org/ranker"}', b'{"documents":[{"text":"\\ud800"}]}'])
async def test_a_malformed_body_is_refused(client: httpx.AsyncClient, body: bytes) -> None:
    answer = await client.post("/v1/rerank", content=body)

    assert answer.status_code == 400
    assert set(answer.json()) == {"message"}


async def test_ten_thousand_documents_are_ranked() -> None:
    gateway = Gateway(chunk_inputs_max=256)
    async with gateway.client() as client:
        answer = await client.post("/v2/rerank", json=body_of(documents=["0.5"] * 10_000, top_n=1))

    assert [one["index"] for one in answer.json()["results"]] == [0]
    assert answer.json()["meta"]["billed_units"] == {"search_units": 100}
    assert len(gateway.queue.jobs) == 40


@pytest.mark.parametrize(
    ("documents", "tokens", "units"),
    [(1, 20, 1), (100, 50_000, 1), (100, 50_001, 2), (101, 500, 2), (1, 10_000, 1), (200, 0, 2)],
)
def test_search_units_are_counted_as_cohere_counts_them(documents: int, tokens: int, units: int) -> None:
    assert rerank.search_units(documents, tokens) == units


async def test_what_has_no_effect_is_named(gateway: Gateway, client: httpx.AsyncClient) -> None:
    gateway.queue.truncated = (0, 2)
    body = body_of(max_chunks_per_doc=10, truncate_prompt_tokens=5, priority=1, return_documents=False)

    answer = await client.post("/v1/rerank", json=body)

    assert answer.headers["x-appliance-ignored"] == "truncate_prompt_tokens,max_chunks_per_doc"
    assert answer.headers["x-appliance-truncated"] == "0,2"


async def test_one_chunk_a_document_is_what_is_done_anyway(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/rerank", json=body_of(max_chunks_per_doc=1))

    assert "x-appliance-ignored" not in answer.headers


async def test_msgpack_comes_and_goes(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/v2/rerank",
        content=msgspec.msgpack.encode(body_of(return_documents=True, top_n=1)),
        headers={"content-type": "application/msgpack", "accept": "application/msgpack"},
    )

    assert answer.headers["content-type"] == "application/msgpack"
    found = msgspec.msgpack.decode(answer.content)
    assert found["results"] == [{"index": 1, "relevance_score": 0.75, "document": {"text": "0.75"}}]


async def test_an_error_comes_as_msgpack_too(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v2/rerank", content=b"\xc1", headers={"accept": "application/msgpack"})

    assert answer.status_code == 400
    assert set(msgspec.msgpack.decode(answer.content)) == {"message"}


async def test_a_document_that_the_node_refuses_is_named(gateway: Gateway, client: httpx.AsyncClient) -> None:
    gateway.queue.failure = Failed("context_length_exceeded", "too long", "documents[1]")

    answer = await client.post("/v1/rerank", json=body_of(truncation=False))

    assert (answer.status_code, answer.json()) == (400, {"message": "documents[1]: too long"})


async def test_a_score_that_is_no_number_is_never_an_answer(gateway: Gateway, client: httpx.AsyncClient) -> None:
    gateway.queue.parts = [Scores(np.array([0.5, np.nan, 0.5], dtype="<f4").tobytes())]

    answer = await client.post("/v1/rerank", json=body_of())

    assert answer.status_code == 500
    assert "no number" in answer.json()["message"]


VALUES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
DOCUMENTS = st.lists(st.text(max_size=9) | st.dictionaries(st.text(max_size=4) | st.just("text"), VALUES), max_size=7)
OPTIONAL = [*rerank.RerankBody.__struct_fields__, "zebra"]
FIELDS = st.fixed_dictionaries(
    {"query": st.text(max_size=9), "documents": DOCUMENTS},
    optional=dict.fromkeys([name for name in OPTIONAL if name not in {"query", "documents"}], VALUES),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=150)
@given(FIELDS, st.sampled_from(PATHS), st.sampled_from(["application/json", "application/msgpack"]))
def test_whatever_is_sent_is_ranked_or_refused(fields: dict[str, Any], path: str, accept: str) -> None:
    async def ask() -> None:
        async with Gateway().client() as client:
            answer = await client.post(path, content=json.dumps(fields), headers={"accept": accept})
        assert answer.status_code in {200, 400, 404}, answer.content
        decode = json.loads if accept == "application/json" else msgspec.msgpack.decode
        found = decode(answer.content)
        if answer.status_code == 200:
            scores = [one["relevance_score"] for one in found["results"]]
            assert scores == sorted(scores, reverse=True)
            assert 1 <= len(scores) <= len(fields["documents"])
            assert found["usage"]["total_tokens"] == TOKENS_OF_AN_INPUT * len(fields["documents"])

    asyncio.run(ask())


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=40), st.sampled_from(["json", "msgpack"]))
def test_bytes_are_refused_or_are_a_request(body: bytes, form: Any) -> None:
    with contextlib.suppress(InvalidRequest):
        rerank.decode(body, "2", form)
