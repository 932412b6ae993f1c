"""`POST /v1/embeddings` through the app: what a name's policy, a header or another dialect makes of a request."""

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from appliance.errors import UnknownPath
from appliance.jobs import Embed
from appliance.settings import AliasSettings
from tests.gateway_parts import KEY, WIDTH, Gateway

MODEL = "org/embedder"
ALIASES = (
    AliasSettings("wide", MODEL, pad_to=6),
    AliasSettings("narrow", MODEL, width=2),
    AliasSettings("narrow-and-wide", MODEL, width=2, pad_to=6),
    AliasSettings("strict", MODEL, too_long="error"),
    AliasSettings("whole", MODEL, too_long="chunk_mean"),
    AliasSettings("questions", MODEL, intent="query"),
    AliasSettings("native", MODEL, integers="native"),
)


@pytest.fixture
def gateway() -> Gateway:
    return Gateway(aliases=ALIASES)


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with gateway.client() as client:
        yield client


async def asked(gateway: Gateway, client: httpx.AsyncClient, fields: dict[str, Any], **headers: str) -> Embed:
    """The task that a request becomes. `Any`: a body's fields."""
    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": "a", **fields}, headers=headers)
    assert answer.status_code == 200, answer.text
    task = gateway.queue.jobs[-1].task
    assert isinstance(task, Embed)
    return task


@pytest.mark.parametrize(
    ("fields", "width"),
    [
        ({"model": "wide"}, 6),
        ({"model": "wide", "dimensions": 6}, 6),
        ({"model": "narrow"}, 2),
        ({"model": "narrow", "dimensions": 3}, 3),
        ({"model": "narrow-and-wide"}, 6),
        ({"output_dimension": 3}, 3),
    ],
)
async def test_the_width_is_the_clients_or_else_the_names(
    client: httpx.AsyncClient, fields: dict[str, object], width: int
) -> None:
    answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": ["a", "b"], **fields})

    rows = [one["embedding"] for one in answer.json()["data"]]
    assert [len(row) for row in rows] == [width, width]
    assert sum(number**2 for number in rows[1]) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("fields", "truncation"),
    [
        ({}, "end"),
        ({"model": "strict"}, "none"),
        ({"model": "whole"}, "chunk_mean"),
        ({"model": "whole", "outputs": ["multivector"]}, "end"),
        ({"model": "strict", "truncate": True}, "end"),
        ({"truncation": False}, "none"),
    ],
)
async def test_long_texts_are_treated_as_the_name_says_unless_the_client_does(
    gateway: Gateway, client: httpx.AsyncClient, fields: dict[str, object], truncation: str
) -> None:
    assert (await asked(gateway, client, fields)).truncation == truncation


@pytest.mark.parametrize(
    ("fields", "header", "intent"),
    [
        ({}, None, None),
        ({"model": "questions"}, None, "query"),
        ({"model": f"{MODEL}@document"}, None, "document"),
        ({"model": "questions"}, "document", "document"),
        ({"model": "questions", "input_type": "passage"}, "query", "document"),
        ({"task": "retrieval.query"}, None, "query"),
        ({}, "Search_Query ", "query"),
    ],
)
async def test_body_before_header_before_name(
    gateway: Gateway, client: httpx.AsyncClient, fields: dict[str, object], header: str | None, intent: str | None
) -> None:
    headers = {"x-appliance-input-type": header} if header is not None else {}

    assert (await asked(gateway, client, fields, **headers)).intent == intent


async def test_a_wrong_word_in_the_header_is_named(client: httpx.AsyncClient) -> None:
    answer = await client.post(
        "/v1/embeddings", json={"model": MODEL, "input": "a"}, headers={"x-appliance-input-type": "image"}
    )

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-appliance-input-type")


@pytest.mark.slow
async def test_token_ids_are_queued_as_text(gateway: Gateway, client: httpx.AsyncClient) -> None:
    assert (await asked(gateway, client, {"input": [[15339], [14957]]})).inputs == ("hello", "world")
    assert (await asked(gateway, client, {"input": [15339, 1917]})).inputs == ("hello world",)


async def test_native_ids_are_queued_as_they_are(gateway: Gateway, client: httpx.AsyncClient) -> None:
    task = await asked(gateway, client, {"model": "native", "input": [[1, 2], [3]]})

    assert (task.inputs, task.ids) == ((), (b"\1\0\0\0\2\0\0\0", b"\3\0\0\0"))


async def test_the_space_is_told_and_held_against_what_is_expected(gateway: Gateway, client: httpx.AsyncClient) -> None:
    gateway.queue.space = "model=m width=4"
    body = {"model": MODEL, "input": "a"}

    plain = await client.post("/v1/embeddings", json=body)
    padded = await client.post("/v1/embeddings", json={**body, "model": "wide"})

    own = plain.headers["x-appliance-fingerprint"]
    assert plain.headers["x-appliance-space"] == "model=m width=4"
    assert len(own) == 16
    assert padded.headers["x-appliance-fingerprint"] != own
    for path, sent in (("/v1/embeddings", body), ("/v2/embed", {"model": MODEL, "texts": ["a"]})):
        same = await client.post(path, json=sent, headers={"x-appliance-expect-fingerprint": own.upper()})
        other = await client.post(path, json=sent, headers={"x-appliance-expect-fingerprint": "0" * 16})
        assert (same.status_code, same.headers["x-appliance-fingerprint"]) == (200, own)
        assert other.status_code == 400
        assert own in other.text


async def test_azures_path_names_the_model(gateway: Gateway, client: httpx.AsyncClient) -> None:
    for path in (f"/openai/deployments/{MODEL}/embeddings", "/openai/deployments/org%2Fembedder/embeddings"):
        answer = await client.post(f"{path}?api-version=2024-10-21", json={"input": "a", "model": "ignored"})

        assert (answer.status_code, answer.json()["model"]) == (200, MODEL)
    other = await client.post("/openai/v1/embeddings", json={"input": "a", "model": MODEL})
    assert other.status_code == 200


@pytest.mark.parametrize(
    "path", ["/openai/deployments/embeddings", "/openai/deployments//embeddings", "/openai/deployments/x/chat"]
)
async def test_what_is_no_azure_path_is_unknown(client: httpx.AsyncClient, path: str) -> None:
    answer = await client.post(path, json={"input": "a"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, UnknownPath.code)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"api-key": KEY}, 200),
        ({"api-key": "sk-another"}, 401),
        ({"api-key": KEY, "authorization": "Bearer sk-another"}, 401),
        ({}, 401),
    ],
)
async def test_azures_key_header(gateway: Gateway, headers: dict[str, str], status: int) -> None:
    async with gateway.client() as client:
        del client.headers["authorization"]
        answer = await client.post("/v1/embeddings", json={"model": MODEL, "input": "a"}, headers=headers)

    assert answer.status_code == status


@pytest.mark.slow
async def test_a_body_of_twenty_megabytes(gateway: Gateway, client: httpx.AsyncClient) -> None:
    texts = ["x" * 9500] * 2048
    sent = json.dumps({"model": MODEL, "input": texts})
    assert 19_000_000 < len(sent) < 20 * 1024 * 1024

    answer = await client.post("/v1/embeddings", content=sent, headers={"content-type": "application/json"})

    assert [len(one["embedding"]) for one in answer.json()["data"]] == [WIDTH] * 2048
