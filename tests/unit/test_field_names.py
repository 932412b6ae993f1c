"""What a client is told of its fields: those that a node finds fault with, and those that change nothing."""

from typing import Any

import pytest

from appliance.compat.generation import in_names
from appliance.errors import InvalidRequest, TooLong
from appliance.jobs import Failed
from tests.gateway_parts import BODIES, Gateway, url_of

CHAT = "/v1/chat/completions"
AZURE = "/openai/deployments/{name}/chat/completions"
SCHEMA = "response_format.json_schema.schema"
PARAMETERS = "tools[1].function.parameters"


def param_of(body: dict[str, Any]) -> str:
    """The field at fault: Cohere's clients find it in the message only."""
    if "error" in body:
        return str(body["error"]["param"])
    return str(body["message"]).split("'")[1]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "named", "own"),
    [
        (CHAT, "messages", "messages"),
        (CHAT, PARAMETERS, PARAMETERS),
        (AZURE, SCHEMA, SCHEMA),
        ("/v1/completions", "prompt", "prompt"),
        ("/v1/responses", "messages", "input"),
        ("/v1/responses", "messages[3].tool_calls[0].function.arguments", "input"),
        ("/v1/responses", PARAMETERS, "tools[1].parameters"),
        ("/v1/responses", SCHEMA, "text.format.schema"),
        ("/v1/responses", "response_format", "text.format"),
        ("/v1/responses", "tools", "tools"),
        ("/v2/chat", "messages", "messages"),
        ("/v2/chat", PARAMETERS, PARAMETERS),
        ("/v2/chat", SCHEMA, "response_format.json_schema"),
        ("/v1/chat", "messages", "message"),
        ("/v1/chat", PARAMETERS, "tools[1].parameter_definitions"),
        ("/v1/chat", SCHEMA, "response_format.schema"),
    ],
)
async def test_a_nodes_refusal_names_the_clients_own_field(path: str, named: str, own: str, is_streamed: bool) -> None:
    gateway = Gateway()
    gateway.queue.failure = Failed.of(TooLong(f"'{named}' has too much; send less", param=named))
    async with gateway.client() as client:
        answer = await client.post(url_of(path), json={**BODIES[path], "stream": is_streamed})

    assert answer.status_code == 400
    assert param_of(answer.json()) == own
    assert f"'{own}' has too much; send less" in answer.json()["message"]


def test_an_error_of_no_field_stays_as_it_is() -> None:
    error = InvalidRequest("'messages' is a word here")

    assert in_names(error, [("messages", "input")]) is error


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"reasoning_effort": "low", "verbosity": "low", "user": "me"}, "reasoning_effort,verbosity"),
        (CHAT, {"reasoning_effort": None, "store": False, "metadata": {}}, None),
        (CHAT, {"colour": "red", "verbosity": "high"}, "colour,verbosity"),
        ("/v1/responses", {"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}, "reasoning,text.verbosity"),
        ("/v2/chat", {"citation_options": {"mode": "FAST"}, "priority": 3}, "citation_options"),
        ("/v2/chat", {"citation_options": {"mode": "OFF"}}, None),
        ("/v1/chat", {"citation_quality": "accurate"}, "citation_quality"),
        ("/v1/chat", {"citation_quality": "off"}, None),
        ("/v1/responses", {"text": {"format": {"type": "text"}}, "store": False}, None),
    ],
)
async def test_what_a_vendor_heeds_and_changes_nothing_here_is_named(
    path: str, fields: dict[str, object], named: str | None
) -> None:
    async with Gateway().client() as client:
        answer = await client.post(path, json={**BODIES[path], **fields})

    assert answer.status_code == 200
    assert answer.headers.get("x-appliance-ignored") == named
