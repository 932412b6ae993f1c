"""Cohere's endpoints through the app: classify, tokens, the key; errors in Cohere's shape, on every spelling."""

import json
from collections.abc import AsyncIterator
from functools import cache
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import Overloaded
from appliance.jobs import Classify, Embed, Failed, Labels, Rows
from appliance.settings import AliasSettings
from tests.gateway_parts import Gateway

POSTS = ("/v1/embed", "/v2/embed", "/v1/classify", "/v1/tokenize", "/v1/detokenize")
EXAMPLES = [{"text": text, "label": text[0]} for text in ("a1", "b1", "a2", "b2")]


@pytest.fixture
def gateway() -> Gateway:
    return Gateway()


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway.client() as client:
        yield client


def message_of(answer: httpx.Response) -> str:
    """Of an error, with its shape checked."""
    body = answer.json()
    assert set(body) == {"message"}
    message: str = body["message"]
    return message


def valid(path: str) -> dict[str, Any]:
    """A body that the path takes."""
    bodies: dict[str, dict[str, Any]] = {
        "/v1/embed": {"model": "org/embedder", "texts": ["a", "b", "c", "d"]},
        "/v2/embed": {"model": "org/embedder", "texts": ["a"], "embedding_types": ["int8", "ubinary"]},
        "/v1/classify": {"model": "org/classifier", "inputs": ["a", "b", "c", "d"]},
        "/v1/tokenize": {"model": "org/ranker", "text": "hé"},
        "/v1/detokenize": {"model": "org/ranker", "tokens": [104, 105]},
    }
    return bodies[path]


async def test_texts_of_several_jobs_are_one_answer(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.queue.truncated = (1, 3)
    body = valid("/v1/embed") | {"input_type": "search_document", "truncate": "START", "max_tokens": 9, "more": 1}

    answer = await client.post("/v1/embed", json=body)

    found = answer.json()
    assert found["embeddings"] == [[0.5] * 4] * 4
    assert found["meta"]["billed_units"] == {"input_tokens": 40}
    assert answer.headers["x-appliance-ignored"] == "more"
    assert answer.headers["x-appliance-truncated"] == "1,3"
    assert [job.task for job in gateway.queue.jobs] == [
        Embed(("a", "b", "c"), intent="document", truncation="start", tokens_max=9),
        Embed(("d",), intent="document", truncation="start", tokens_max=9),
    ]


@pytest.mark.parametrize("fields", [{}, {"embedding_types": ["float"]}])
async def test_without_a_model_s_name_the_first_that_embeds_does(
    client: httpx.AsyncClient, gateway: Gateway, fields: dict[str, Any]
) -> None:
    answer = await client.post("/v1/embed", json={"texts": ["a"]} | fields)

    assert answer.status_code == 200
    assert gateway.queue.jobs[0].model == "org/embedder"
    assert (await client.post("/v2/embed", json={"texts": ["a"]} | fields)).status_code == 400


@pytest.mark.parametrize(
    ("fields", "task"),
    [
        ({}, Embed(("a",), intent="query", width=2, truncation="chunk_mean")),
        ({"input_type": "search_document"}, Embed(("a",), intent="document", width=2, truncation="chunk_mean")),
        ({"input_type": "clustering"}, Embed(("a",), intent="query", width=2, truncation="chunk_mean")),
        ({"truncate": "END"}, Embed(("a",), intent="query", width=2, truncation="end")),
        ({"truncate": "NONE"}, Embed(("a",), intent="query", width=2, truncation="none")),
        ({"output_dimension": 4}, Embed(("a",), intent="query", width=4, truncation="chunk_mean")),
        ({"output_dimension": 6}, Embed(("a",), intent="query", width=2, truncation="chunk_mean")),
    ],
)
async def test_the_client_wins_over_an_alias_policy(fields: dict[str, Any], task: Embed) -> None:
    alias = AliasSettings("it", "org/embedder", intent="query", width=2, pad_to=6, too_long="chunk_mean")
    gateway = Gateway(aliases=(alias,))

    async with gateway.client() as client:
        answer = await client.post("/v2/embed", json={"model": "it", "texts": ["a"]} | fields)

    assert gateway.queue.jobs[0].task == task
    (vector,) = answer.json()["embeddings"]["float"]
    assert len(vector) == (4 if task.width == 4 else 6)


async def test_zeros_that_are_added_are_zeros_in_every_type(gateway: Gateway) -> None:
    padded = Gateway(aliases=(AliasSettings("it", "org/embedder", pad_to=16),))
    types = ["float", "int8", "uint8", "ubinary", "binary"]

    async with padded.client() as client, gateway.client() as plain:
        wide = await client.post("/v2/embed", json={"model": "it", "texts": ["a"], "embedding_types": types})
        own = await plain.post("/v2/embed", json={"model": "org/embedder", "texts": ["a"], "embedding_types": types})

    wide_vectors, own_vectors = wide.json()["embeddings"], own.json()["embeddings"]
    assert wide_vectors["float"] == [own_vectors["float"][0] + [0] * 12]
    assert wide_vectors["int8"] == [own_vectors["int8"][0] + [0] * 12]
    assert wide_vectors["uint8"] == [own_vectors["uint8"][0] + [128] * 12]
    assert wide_vectors["ubinary"] == [own_vectors["ubinary"][0] + [0]]
    assert wide_vectors["binary"] == [own_vectors["binary"][0] + [-128]]


async def test_a_node_s_width_is_cohere_s_dimension(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.queue.failure = Failed(
        "invalid_value", "'dimensions' is 7, it gives 4; leave 'dimensions' out", "dimensions"
    )

    answer = await client.post("/v2/embed", json=valid("/v2/embed") | {"output_dimension": 7})

    assert message_of(answer) == "'output_dimension' is 7, it gives 4; leave 'output_dimension' out"


@pytest.mark.parametrize("bad", [np.nan, np.inf])
async def test_a_vector_that_is_no_number_is_no_answer(client: httpx.AsyncClient, gateway: Gateway, bad: float) -> None:
    gateway.queue.parts = [Rows(np.array([0.75, bad], "<f4").tobytes(), 2)]

    answer = await client.post("/v2/embed", json={"model": "org/embedder", "texts": ["a"]})

    assert (answer.status_code, "not finite" in message_of(answer)) == (500, True)


async def test_a_classifier_says_its_labels(client: httpx.AsyncClient, gateway: Gateway) -> None:
    answer = await client.post("/v1/classify", json=valid("/v1/classify") | {"truncate": "START", "more": 1})

    found = answer.json()
    assert [one["input"] for one in found["classifications"]] == ["a", "b", "c", "d"]
    assert {one["prediction"] for one in found["classifications"]} == {"positive"}
    assert found["classifications"][0]["labels"] == {"negative": {"confidence": 0.25}, "positive": {"confidence": 0.75}}
    assert found["meta"]["billed_units"] == {"classifications": 4}
    assert [job.task for job in gateway.queue.jobs] == [
        Classify(("a", "b", "c"), "start"),
        Classify(("d",), "start"),
    ]
    assert answer.headers["x-appliance-ignored"] == "more"


async def test_independent_labels_are_answered_as_such(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.queue.parts = [Labels(("x", "y"), np.array([0.75, 0.875], "<f4").tobytes(), True)]

    answer = await client.post("/v1/classify", json={"model": "org/classifier", "inputs": ["a"]})

    (found,) = answer.json()["classifications"]
    assert (found["classification_type"], found["predictions"]) == ("multi-label", ["y", "x"])


async def test_a_confidence_that_is_no_number_is_no_answer(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.queue.parts = [Labels(("x", "y"), np.array([0.75, np.nan], "<f4").tobytes())]

    answer = await client.post("/v1/classify", json={"model": "org/classifier", "inputs": ["a"]})

    assert answer.status_code == 500
    assert "no number" in message_of(answer)


async def test_a_model_that_embeds_classifies_by_examples() -> None:
    gateway = Gateway(chunk_inputs_max=100)
    axis = {"a": [1, 0.1], "b": [0.1, 1]}
    rows = [axis[text] for text in "ababba"]
    gateway.queue.parts = [Rows(np.array(rows, "<f4").tobytes(), 2)]
    body = {"model": "org/embedder", "inputs": ["b?", "a?"], "examples": EXAMPLES, "truncate": "NONE"}

    async with gateway.client() as client:
        answer = await client.post("/v1/classify", json=body)

    found = answer.json()["classifications"]
    assert [one["prediction"] for one in found] == ["b", "a"]
    assert all(one["confidence"] > 0.9 for one in found)
    assert all(sum(label["confidence"] for label in one["labels"].values()) == pytest.approx(1) for one in found)
    assert gateway.queue.jobs[0].task == Embed(("a1", "b1", "a2", "b2", "b?", "a?"), truncation="none")


@pytest.mark.parametrize(
    ("body", "model"),
    [({}, "org/classifier"), ({"examples": EXAMPLES}, "org/embedder")],
)
async def test_without_a_model_s_name_one_that_can_do_it_classifies(
    client: httpx.AsyncClient, gateway: Gateway, body: dict[str, Any], model: str
) -> None:
    answer = await client.post("/v1/classify", json={"inputs": ["a"]} | body)

    assert answer.status_code == 200
    assert gateway.queue.jobs[0].model == model


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"model": "org/embedder"}, "send 'examples'"),
        ({"model": "org/classifier", "examples": EXAMPLES}, "leave 'examples' out"),
        ({"model": "org/ranker"}, "does not classify or embed; it serves /v1/rerank"),
    ],
)
async def test_examples_are_for_models_that_embed(client: httpx.AsyncClient, body: dict[str, Any], words: str) -> None:
    answer = await client.post("/v1/classify", json={"inputs": ["a"]} | body)

    assert answer.status_code == 400
    assert words in message_of(answer)


@pytest.mark.parametrize(
    ("param", "message", "told"),
    [
        ("input[1]", "input 1 has 9 tokens, the model takes 8", "'examples[1].text' has 9 tokens, the model takes 8"),
        ("input[5]", "'input[5]' has 9 tokens of input 51", "'inputs[1]' has 9 tokens of input 51"),
        ("input[4]", "broken", "inputs[0]: broken"),
        (None, "all is broken", "all is broken"),
    ],
)
async def test_an_error_of_a_node_names_the_client_s_field(
    client: httpx.AsyncClient, gateway: Gateway, param: str | None, message: str, told: str
) -> None:
    gateway.queue.failure = Failed("context_length_exceeded", message, param)

    answer = await client.post(
        "/v1/classify", json={"model": "org/embedder", "inputs": ["a", "b"], "examples": EXAMPLES}
    )

    assert (answer.status_code, message_of(answer)) == (400, told)


async def test_what_was_cut_is_said(client: httpx.AsyncClient, gateway: Gateway) -> None:
    gateway.queue.truncated = (2, 5)

    answer = await client.post(
        "/v1/classify", json={"model": "org/embedder", "inputs": ["a", "b"], "examples": EXAMPLES}
    )

    assert answer.headers["x-appliance-truncated"] == "examples[2],1"


@pytest.mark.parametrize(
    ("alias", "truncation"),
    [(None, "end"), ("error", "none"), ("chunk_mean", "chunk_mean")],
)
async def test_an_alias_has_its_policy(alias: Any, truncation: str) -> None:
    aliases = (AliasSettings("it", "org/embedder", intent="query", too_long=alias or "truncate"),)
    gateway = Gateway(aliases=aliases, chunk_inputs_max=100)

    async with gateway.client() as client:
        await client.post("/v1/classify", json={"model": "it", "inputs": ["a"], "examples": EXAMPLES})

    (job,) = gateway.queue.jobs
    assert isinstance(job.task, Embed)
    assert (job.task.truncation, job.task.intent) == (truncation, "query")


async def test_a_text_is_cut_into_tokens_and_put_together_again(client: httpx.AsyncClient) -> None:
    tokens = await client.post("/v1/tokenize", json=valid("/v1/tokenize") | {"more": 1})
    text = await client.post("/v1/detokenize", json=valid("/v1/detokenize"))

    meta = {"api_version": {"version": "1"}}
    assert tokens.json() == {"tokens": [104, 233], "token_strings": ["h", "é"], "meta": meta}
    assert tokens.headers["x-appliance-ignored"] == "more"
    assert text.json() == {"text": "hi", "meta": meta}


async def test_a_key_is_valid_where_it_is_taken(client: httpx.AsyncClient, gateway: Gateway) -> None:
    assert (await client.post("/v1/check-api-key")).json() == {"valid": True}
    async with gateway.client(authorization="Bearer another") as stranger:
        answer = await stranger.post("/v1/check-api-key")

    assert answer.status_code == 401
    assert answer.json()["message"] == answer.json()["error"]["message"]


@pytest.mark.parametrize("prefix", ["", "/v1", "/v2"])
@pytest.mark.parametrize("path", POSTS)
async def test_a_doubled_prefix_is_served(client: httpx.AsyncClient, path: str, prefix: str) -> None:
    assert (await client.post(f"{prefix}{path}", json=valid(path))).status_code == 200
    assert (await client.post(path.removeprefix("/v1"), json=valid(path))).status_code == 200


@pytest.mark.parametrize("path", POSTS)
async def test_errors_are_in_cohere_s_shape(client: httpx.AsyncClient, gateway: Gateway, path: str) -> None:
    unknown = await client.post(path, json=valid(path) | {"model": "nothing"})
    assert (unknown.status_code, "nothing" in message_of(unknown)) == (404, True)
    broken = await client.post(path, content=b"{")
    assert (broken.status_code, "not valid JSON" in message_of(broken)) == (400, True)
    wrong = await client.get(path)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert "takes POST, not GET" in wrong.json()["message"]
    gateway.queue.failure = Failed.of(Overloaded("full", retry_after_s=2.5))
    full = await client.post(path, json=valid(path))
    assert (full.status_code, full.headers["retry-after"], message_of(full)) == (503, "3", "full")
    assert "x-ratelimit-reset" not in full.headers


@pytest.mark.parametrize("path", POSTS)
async def test_msgpack_is_read_and_written(client: httpx.AsyncClient, path: str) -> None:
    headers = {"content-type": "application/msgpack", "accept": "application/msgpack"}
    plain = (await client.post(path, json=valid(path))).json()

    answer = await client.post(path, content=msgspec.msgpack.encode(valid(path)), headers=headers)
    refused = await client.post(path, content=b"\xc1", headers=headers)

    assert answer.headers["content-type"] == refused.headers["content-type"] == "application/msgpack"
    assert comparable(msgspec.msgpack.decode(answer.content)) == comparable(plain)
    assert refused.status_code == 400
    assert "not valid msgpack" in msgspec.msgpack.decode(refused.content)["message"]


def comparable(value: Any) -> Any:
    """A copy without what is another one each time, and without vectors, which each form has in its own way."""
    match value:
        case dict():
            return {key: comparable(one) for key, one in value.items() if key not in {"id", "embeddings"}}
        case list():
            return [comparable(one) for one in value]
        case _:
            return value


@cache
def one_gateway() -> Gateway:
    """For tests that ask often, since making it takes longer than asking it."""
    return Gateway()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
FIELDS = (
    "model",
    "texts",
    "images",
    "input_type",
    "embedding_types",
    "output_dimension",
    "max_tokens",
    "inputs",
    "examples",
    "preset",
    "truncate",
    "text",
    "tokens",
)


@pytest.mark.slow
@given(
    path=st.sampled_from(POSTS),
    fields=st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=5), VALUES, max_size=4),
    dropped=st.sets(st.sampled_from(FIELDS), max_size=1),
    is_msgpack=st.booleans(),
)
@settings(max_examples=300, deadline=None)
async def test_no_body_is_a_fault_of_ours(
    path: str, fields: dict[str, Any], dropped: set[str], is_msgpack: bool
) -> None:
    body = {name: value for name, value in (valid(path) | fields).items() if name not in dropped}
    headers = {"content-type": "application/msgpack" if is_msgpack else "application/json"}
    try:
        content = msgspec.msgpack.encode(body) if is_msgpack else json.dumps(body).encode()
    except OverflowError:  # no msgpack has such a number
        return

    async with one_gateway().client() as client:
        answer = await client.post(path, content=content, headers=headers)

    assert answer.status_code in {200, 400, 404}, answer.text
    assert answer.status_code == 200 or message_of(answer)
