"""`/v1/models` in the words of both families: every name, the defaults, and Cohere's filters and pages."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import msgspec
import pytest

from appliance.compat.models import PAGE_SIZE_MAX, ModelObject, page
from appliance.errors import InvalidRequest
from appliance.presets import Facts
from appliance.settings import AliasSettings
from tests.gateway_parts import Gateway
from tests.node_parts import until

MODELS = (
    Facts("org/ranker", tasks=("rerank",), tokens_max=512),
    Facts("org/embedder", tasks=("embed",), width=8, tokens_max=256, aliases=("embed-english-v3.0",)),
    Facts("other", tasks=("embed",)),
)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    gateway = Gateway(models=MODELS, aliases=(AliasSettings("q", "org/embedder", intent="query"),))
    async with gateway.client() as client:
        yield client


def model(name: str, **fields: Any) -> ModelObject:  # `Any`: some of the struct's own fields
    made = ModelObject(
        name, "model", 5, "org", None, ("embed",), 8, 256, ("dense",), None, name, ("embed", "classify"), (), 256
    )
    return msgspec.structs.replace(made, **fields)


async def test_an_object_has_the_fields_of_both_families(client: httpx.AsyncClient) -> None:
    found = (await client.get("/v1/models")).json()

    assert found["object"] == "list"
    assert found["data"] == found["models"]
    assert found["next_page_token"] is None
    alias = next(one for one in found["data"] if one["id"] == "embed-english-v3.0")
    assert alias.pop("created") > 1_700_000_000
    assert alias == {
        "id": "embed-english-v3.0",
        "object": "model",
        "owned_by": "org",
        "reranks_by": None,
        "root": "org/embedder",
        "tasks": ["embed"],
        "width": 8,
        "tokens_max": 256,
        "outputs": ["dense"],
        "name": "embed-english-v3.0",
        "endpoints": ["embed", "classify"],
        "default_endpoints": [],
        "context_length": 256,
        "is_deprecated": False,
        "finetuned": False,
        "tokenizer_url": None,
        "features": None,
    }


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("endpoint=embed", ["org/embedder", "embed-english-v3.0", "other", "q"]),
        ("endpoint=rerank", ["org/ranker"]),
        ("endpoint=chat", []),
        ("endpoint=embed&default_only=true", ["org/embedder"]),
        ("endpoint=classify&default_only=True", ["org/embedder"]),
        ("endpoint=rerank&default_only=false", ["org/ranker"]),
        ("default_only=true", ["org/ranker", "org/embedder"]),
        ("unknown=x&after=y", ["org/ranker", "org/embedder", "embed-english-v3.0", "other", "q"]),
    ],
)
async def test_models_are_filtered_as_cohere_does_and_data_never(
    client: httpx.AsyncClient, query: str, names: list[str]
) -> None:
    found = (await client.get(f"/v1/models?{query}")).json()

    assert [one["name"] for one in found["models"]] == names
    assert len(found["data"]) == 5


async def test_a_model_without_dense_vectors_is_none_of_cohere_s() -> None:
    gateway = Gateway(models=(Facts("splade", outputs=("sparse",)), *MODELS))
    async with gateway.client() as client:
        sparse, ranker, *_ = (await client.get("/v1/models")).json()["models"]
        (default,) = (await client.get("/v1/models?endpoint=embed&default_only=true")).json()["models"]
        refused = await client.post("/v1/embed", json={"model": "splade", "texts": ["a"]})

    assert (sparse["outputs"], sparse["endpoints"], sparse["default_endpoints"]) == (["sparse"], [], [])
    assert (ranker["outputs"], default["name"]) == ([], "org/embedder")
    assert refused.status_code == 400
    assert "has no dense vectors; ask /v1/embeddings for sparse ones" in refused.json()["message"]


async def test_a_model_that_writes_has_the_length_that_its_node_told_last() -> None:
    writer = Facts("org/writer", tasks=("generate",), tokens_max=8192, aliases=("gpt-4o-mini",))
    gateway = Gateway(models=(writer, *MODELS))
    gateway.queue.tokens_max = 4096
    async with gateway.client() as client:
        before = (await client.get("/v1/models/org/writer")).json()
        watching = asyncio.create_task(gateway.canary.run())
        await until(lambda: not gateway.canary.faults())
        watching.cancel()
        listed = {one["id"]: one for one in (await client.get("/v1/models")).json()["data"]}
        alone = (await client.get("/v1/models/gpt-4o-mini")).json()

    assert (before["tokens_max"], before["context_length"]) == (None, None)
    assert alone == listed["gpt-4o-mini"]
    for name in ("org/writer", "gpt-4o-mini"):
        assert (listed[name]["tokens_max"], listed[name]["context_length"]) == (4096, 4096)
    assert listed["org/embedder"]["tokens_max"] == 256


@pytest.mark.parametrize("size", [1, 2, 4, 5, 1000])
async def test_pages_lead_through_all(client: httpx.AsyncClient, size: int) -> None:
    names: list[str] = []
    token = ""
    while True:
        found = (await client.get(f"/v1/models?page_size={size}.0{token}")).json()
        assert len(found["models"]) <= size
        names += [one["name"] for one in found["models"]]
        if found["next_page_token"] is None:
            break
        token = f"&page_token={found['next_page_token']}"

    assert names == ["org/ranker", "org/embedder", "embed-english-v3.0", "other", "q"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ({"page_size": "0"}, "page_size"),
        ({"page_size": str(PAGE_SIZE_MAX + 1)}, "page_size"),
        ({"page_size": "ten"}, "page_size"),
        ({"page_size": "2.5"}, "page_size"),
        ({"page_size": "²"}, "page_size"),
        ({"page_size": ""}, "page_size"),
        ({"page_token": "-1"}, "page_token"),
        ({"page_token": "3"}, "page_token"),
        ({"page_token": "9" * 5000}, "page_token"),
        ({"default_only": "maybe"}, "default_only"),
    ],
)
def test_a_wrong_parameter_is_named(query: dict[str, str], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        page([model("a"), model("b")], query)

    assert caught.value.param == param
    assert len(caught.value.message) < 100


async def test_a_wrong_parameter_is_told_in_both_shapes(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models?page_size=0")

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "page_size"
    assert answer.json()["message"] == answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["org/embedder@query", "org%2Fembedder%40query", "embed-english-v3.0@query"])
async def test_a_name_with_an_intent_is_found_and_not_listed(client: httpx.AsyncClient, path: str) -> None:
    found = (await client.get(f"/v1/models/{path}")).json()
    listed = (await client.get("/v1/models")).json()["data"]

    assert found["id"] == found["name"]
    assert found["id"].endswith("@query")
    assert (found["root"], found["default_endpoints"]) == ("org/embedder", [])
    assert found["id"] not in [one["id"] for one in listed]


async def test_msgpack_is_answered_to_who_asks_for_it(client: httpx.AsyncClient) -> None:
    for path in ("/v1/models", "/v1/models/other"):
        as_json = await client.get(path)
        answer = await client.get(path, headers={"accept": "application/msgpack"})

        assert answer.headers["content-type"] == "application/msgpack"
        assert msgspec.msgpack.decode(answer.content) == json.loads(as_json.content)
