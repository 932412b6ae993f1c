"""What the load test takes for a right answer."""

import base64
import struct
from typing import Any  # JSON as clients see it

import orjson
import pytest

from appliance.bench.answers import judge


def vector(*values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def body(*embeddings: Any, indexes: list[int] | None = None, usage: Any = None) -> bytes:
    rows = [
        {"object": "embedding", "index": index, "embedding": embedding}
        for index, embedding in zip(indexes or range(len(embeddings)), embeddings, strict=True)
    ]
    return orjson.dumps({"object": "list", "data": rows, "model": "m", **({"usage": usage} if usage else {})})


@pytest.mark.parametrize(
    "answer",
    [
        body([0.5, 0.5], [1.0, 0.0]),
        body(vector(0.5, 0.5), vector(1.0, 0.0)),
        body([1, 0], [0, 1], indexes=[1, 0]),
    ],
)
def test_right_answers(answer: bytes) -> None:
    assert judge(200, answer, inputs=2).kind == "right"


def test_tokens_are_as_the_server_counted_them() -> None:
    assert judge(200, body([1.0], usage={"prompt_tokens": 7, "total_tokens": 7}), inputs=1).tokens == 7


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>",
        orjson.dumps({"object": "list"}),
        body(),
        body([0.5]),
        body([0.5], [0.5], indexes=[0, 0]),
        body([0.5], [0.5], [0.5]),
        body([0.5], [0.5, 0.5]),
        body([], []),
        body("", ""),
        body("AAAA", "AAAA"),  # three bytes are no float
        body("?", "?"),
        body(vector(0.5), vector(float("nan"))),
        body(vector(0.5), vector(float("inf"))),
    ],
)
def test_wrong_answers(answer: bytes) -> None:
    verdict = judge(200, answer, inputs=2)

    assert verdict.kind == "wrong"
    assert verdict.reason


@pytest.mark.parametrize(("status", "kind"), [(429, "refused"), (503, "refused"), (500, "failed"), (400, "failed")])
def test_errors_are_told_apart(status: int, kind: str) -> None:
    verdict = judge(status, b'{"error": {"message": "why"}}', inputs=1)

    assert verdict.kind == kind
    assert str(status) in verdict.reason
    assert "why" in verdict.reason
