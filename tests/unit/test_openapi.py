"""The OpenAPI document: valid, complete, open, and of the same table as the routes."""

import re
from typing import Any

import msgspec
import pytest
from openapi_spec_validator import validate

from appliance.gateway.openapi import document
from appliance.gateway.operation import Operation
from tests.gateway_parts import BODIES, Gateway, url_of

MSGPACK = "application/msgpack"
OPENAI = {"$ref": "#/components/schemas/OpenAIErrorBody"}
COHERE = {"$ref": "#/components/schemas/CohereErrorBody"}


async def schema_of(path: str = "/schema") -> dict[str, Any]:
    async with Gateway().client(authorization="") as client:
        answer = await client.get(path)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.slow
async def test_it_is_valid_and_open_to_all() -> None:
    schema = await schema_of()

    assert schema["openapi"] == "3.1.0"
    validate(schema)
    assert await schema_of("/schema/openapi.json") == schema


async def test_whatever_is_described_is_served_by_these_methods_only() -> None:
    schema = await schema_of()
    async with Gateway().client() as client:
        for path, item in schema["paths"].items():
            real = re.sub(r"\{\w+\}", "org/ranker", path)
            for method in item:
                answer = await client.request(method, real)
                assert answer.status_code in {200, 400, 503}, (method, path)
            answer = await client.request("PATCH", real)
            assert answer.status_code == 405
            if allowed := answer.headers.get("allow"):
                assert set(allowed.lower().split(", ")) == set(item)


async def test_only_what_is_no_inference_is_open() -> None:
    schema = await schema_of()
    is_open = {
        path for path, item in schema["paths"].items() if any(one.get("security") == [] for one in item.values())
    }

    assert is_open == {"/healthz", "/readyz", "/schema"}
    async with Gateway().client(authorization="") as client:
        for path in schema["paths"]:
            answer = await client.post(re.sub(r"\{\w+\}", "x", path))
            assert (answer.status_code == 401) == (path not in is_open), path


async def test_a_body_may_have_unknown_fields_and_both_forms() -> None:
    schema = await schema_of()

    for item in schema["paths"].values():
        for operation in item.values():
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]
                assert set(content) == {"application/json", "application/msgpack"}
                name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
                assert schema["components"]["schemas"][name].get("additionalProperties") is not False
                assert "x-appliance-ignored" in operation["responses"]["200"]["headers"]


async def test_every_endpoint_that_takes_a_body_speaks_both_forms() -> None:
    schema = await schema_of()
    taking = {path for path, item in schema["paths"].items() if "requestBody" in item.get("post", {})}
    assert taking == set(BODIES)

    async with Gateway().client() as client:
        for path, body in BODIES.items():
            plain = await client.post(url_of(path), json=body)
            packed = await client.post(
                url_of(path), content=msgspec.msgpack.encode(body), headers={"content-type": MSGPACK, "accept": MSGPACK}
            )
            refused = await client.post(url_of(path), content=b"", headers={"accept": MSGPACK})

            assert [answer.status_code for answer in (plain, packed, refused)] == [200, 200, 400], path
            kinds = [answer.headers["content-type"] for answer in (plain, packed, refused)]
            assert kinds == ["application/json", MSGPACK, MSGPACK], path
            assert set(msgspec.msgpack.decode(packed.content)) == set(plain.json()), path
            assert "message" in msgspec.msgpack.decode(refused.content), path


async def test_every_endpoint_that_streams_says_so_and_does() -> None:
    schema = await schema_of()
    async with Gateway().client() as client:
        for path, body in BODIES.items():
            described = schema["paths"][path]["post"]["responses"]["200"]
            answer = await client.post(url_of(path), json={**body, "stream": True})

            kind = answer.headers["content-type"]
            assert set(described["content"]) == {"application/json", MSGPACK, kind}, path
            assert {name for name in ("cache-control", "x-accel-buffering") if name in answer.headers} == {
                name for name in ("cache-control", "x-accel-buffering") if name in described["headers"]
            }, path
            assert ("content-length" in answer.headers) == (kind == "application/json"), path


async def test_errors_are_described_in_the_paths_own_dialect() -> None:
    schema = await schema_of()

    def error_of(path: str) -> object:
        name = schema["paths"][path]["post"]["responses"]["400"]["$ref"].rpartition("/")[2]
        return schema["components"]["responses"][name]["content"]["application/json"]["schema"]

    assert error_of("/v1/extract") == OPENAI
    assert error_of("/v1/rerank") == COHERE


async def test_every_name_is_used_once() -> None:
    schema = await schema_of()
    ids = [operation["operationId"] for item in schema["paths"].values() for operation in item.values()]

    assert len(set(ids)) == len(ids)


def test_parameters_are_described() -> None:
    operation = Operation(
        paths=("/a/{name:str}/b", "/also"), name="a", summary="s", methods=("GET",), query=("limit",), statuses=(503,)
    )

    described = document([operation])["paths"]["/a/{name}/b"]["get"]

    assert [(one["name"], one["in"]) for one in described["parameters"]] == [("name", "path"), ("limit", "query")]
    assert described["description"] == "Also served at /also."
    assert set(described["responses"]) == {"200", "400", "401", "405", "500", "503"}
