"""schemathesis over the OpenAPI document: whatever fits it, or nearly, gets an answer that the document describes.

The app runs in process over a queue that answers at once, so that what is tested is the gateway's reading and writing.
"""

from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.gateway_parts import KEY, MODELS, Gateway

pytestmark = pytest.mark.slow

EXAMPLES_MAX = 25  # an operation
MSGPACK = "application/msgpack"
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
NAMES = [facts.name for facts in MODELS]
RIGHT = {  # by a word in the path
    "rerank": "org/ranker",
    "classify": "org/classifier",
    "extract": "org/finder",
    "chat": "org/writer",
    "completions": "org/writer",
    "responses": "org/writer",
    "decisions": "org/writer",
}


@schemathesis.serializer(MSGPACK)
def to_msgpack(ctx: schemathesis.SerializationContext, value: Any) -> bytes | None:
    """What msgpack cannot say is not sent."""
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, TypeError, UnicodeEncodeError):
        return None


@pytest.fixture(scope="module")
def api() -> Any:  # `Any`: schemathesis' own schema, of no published type
    gateway = Gateway()
    for name in NAMES:
        gateway.canary.prove(name)
    return schemathesis.openapi.from_asgi("/schema", gateway.app)


@pytest.mark.parametrize("mode", list(GenerationMode))
def test_every_answer_is_as_described(api: Any, mode: GenerationMode) -> None:
    operations = [found.ok() for found in api.get_all_operations()]
    assert {operation.path for operation in operations} >= {"/v1/embeddings", "/v1/rerank", "/v1/responses", "/readyz"}
    for operation in operations:
        if mode.is_positive or operation.body:
            _check(operation, mode)


def _check(operation: Any, mode: GenerationMode) -> None:
    @settings(
        max_examples=EXAMPLES_MAX,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(operation.as_strategy(mode), _models(operation.path), st.booleans())
    def ask(case: Case[Any], model: str | None, wants_msgpack: bool) -> None:
        if model is not None and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = model
        accept = MSGPACK if wants_msgpack else "application/json"
        headers = {
            "authorization": f"Bearer {KEY}",
            "accept": accept,
            "x-stainless-read-timeout": "10",
        }  # then it's a 504
        answer = case.call(headers=headers)
        checks = CHECKS[:3] if wants_msgpack else CHECKS  # in msgpack a vector is bytes, which no schema describes
        case.validate_response(answer, checks=checks)

    ask()


def _models(path: str) -> st.SearchStrategy[str | None]:
    """The right one for a path in half of the cases; None: whatever was generated."""
    right = next((name for word, name in RIGHT.items() if word in path), NAMES[0])
    return st.just(right) | st.sampled_from([*NAMES, None])
