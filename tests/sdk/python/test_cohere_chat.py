"""Cohere's Python clients chat through both API versions: whole and streamed, with tools, in a schema's form.

The model is small and often wrong, so the answers are held to their form and to each other, not to what they say.
"""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import cohere
import pytest
from cohere.errors import BadRequestError, NotFoundError

from tests.sdk.python.appliance_facts import CHAT

QUESTION = "What is the capital of France? Answer in one sentence."
CITIES = ["Paris", "Oslo"]
FORM = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "The weather of a city", "parameters": FORM},
}
USER: Any = {"role": "user", "content": QUESTION}
GREEDY: dict[str, Any] = {"model": CHAT, "temperature": 0, "max_tokens": 24}


@pytest.fixture
def v1() -> Iterator[cohere.Client]:
    """Knows the appliance by CO_API_URL and CO_API_KEY alone."""
    with cohere.Client() as client:
        yield client


@pytest.fixture
def v2() -> Iterator[cohere.ClientV2]:
    with cohere.ClientV2() as client:
        yield client


def test_v2_answers(v2: cohere.ClientV2) -> None:
    answer = v2.chat(messages=[USER], **GREEDY)

    assert answer.id
    assert answer.finish_reason in {"COMPLETE", "MAX_TOKENS"}
    assert answer.message.role == "assistant"
    (said,) = answer.message.content
    assert (said.type, bool(said.text)) == ("text", True)
    assert answer.usage.tokens.input_tokens > 0
    assert 0 < answer.usage.tokens.output_tokens <= 24
    assert answer.usage.billed_units.output_tokens == answer.usage.tokens.output_tokens


def test_v2_streams_what_it_answers(v2: cohere.ClientV2) -> None:
    whole = v2.chat(messages=[USER], **GREEDY)
    events = list(v2.chat_stream(messages=[USER], **GREEDY))

    kinds = [event.type for event in events]
    assert kinds[:2] == ["message-start", "content-start"]
    assert kinds[-2:] == ["content-end", "message-end"]
    assert set(kinds[2:-2]) == {"content-delta"}
    pieces = [event.delta.message.content.text for event in events if event.type == "content-delta"]
    assert "".join(pieces) == whole.message.content[0].text
    assert len(pieces) > 1
    last = events[-1].delta
    assert last.finish_reason == whole.finish_reason
    assert last.usage.tokens == whole.usage.tokens


def test_v2_reads_the_whole_conversation(v2: cohere.ClientV2) -> None:
    history: list[Any] = [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": [{"type": "text", "text": "Good day. 🦀 Grüße"}]},
        {"role": "assistant", "content": [{"type": "text", "text": "Good day."}]},
        USER,
    ]
    short = v2.chat(messages=[USER], **GREEDY)
    long = v2.chat(messages=history, documents=["Paris is the capital.", {"data": {"text": "So it is."}}], **GREEDY)

    assert long.usage.tokens.input_tokens > short.usage.tokens.input_tokens + 20


def test_v2_calls_a_tool_and_reads_its_result(v2: cohere.ClientV2) -> None:
    fields: Any = {"tools": [WEATHER], "strict_tools": True} | GREEDY | {"max_tokens": 100}
    asked = v2.chat(messages=[USER], tool_choice="REQUIRED", **fields)

    assert asked.finish_reason == "TOOL_CALL"
    assert asked.message.tool_calls
    for call in asked.message.tool_calls:
        assert (call.type, call.function.name) == ("function", "weather")
        assert json.loads(call.function.arguments)["city"] in CITIES
    results: list[Any] = [
        {
            "role": "tool",
            "tool_call_id": call.id,
            "content": [{"type": "document", "document": {"data": {"weather": "fine"}}}],
        }
        for call in asked.message.tool_calls
    ]
    answer = v2.chat(messages=[USER, asked.message, *results], tool_choice="NONE", **fields)
    assert answer.message.tool_calls is None
    assert answer.message.content[0].text


def test_v2_streams_a_call(v2: cohere.ClientV2) -> None:
    fields: Any = {"tools": [WEATHER], "tool_choice": "REQUIRED"} | GREEDY | {"max_tokens": 100}
    events = list(v2.chat_stream(messages=[USER], **fields))

    calls: dict[int, str] = {}
    for event in events:
        if event.type == "tool-call-start":
            assert event.delta.message.tool_calls.id
            assert event.delta.message.tool_calls.function.name == "weather"
            calls[event.index] = event.delta.message.tool_calls.function.arguments
        elif event.type == "tool-call-delta":
            calls[event.index] += event.delta.message.tool_calls.function.arguments
    assert calls
    assert all(json.loads(arguments)["city"] in CITIES for arguments in calls.values())
    assert [event.type for event in events].count("tool-call-end") == len(calls)
    assert events[-1].delta.finish_reason == "TOOL_CALL"


def test_v2_answers_in_the_form_of_a_schema(v2: cohere.ClientV2) -> None:
    form: Any = {"type": "json_object", "json_schema": FORM}
    answer = v2.chat(messages=[USER], response_format=form, **GREEDY)
    events = v2.chat_stream(messages=[USER], response_format=form, **GREEDY)

    text = answer.message.content[0].text
    assert json.loads(text)["city"] in CITIES
    assert "".join(event.delta.message.content.text for event in events if event.type == "content-delta") == text


def test_v2_stops_where_it_is_told_to(v2: cohere.ClientV2) -> None:
    whole = v2.chat(messages=[USER], **GREEDY).message.content[0].text
    stop = whole[len(whole) // 2 :][:3]

    stopped = v2.chat(messages=[USER], stop_sequences=[stop], **GREEDY)
    assert stopped.finish_reason == "STOP_SEQUENCE"
    assert stopped.message.content[0].text == whole.partition(stop)[0]
    cut = v2.chat(messages=[USER], **GREEDY | {"max_tokens": 2})
    assert (cut.finish_reason, cut.usage.tokens.output_tokens) == ("MAX_TOKENS", 2)


def test_v2_repeats_itself_with_a_seed(v2: cohere.ClientV2) -> None:
    fields: Any = {"seed": 7, "k": 50, "p": 0.9, "temperature": 1.0}
    first, second = (v2.chat(messages=[USER], **GREEDY | fields) for _ in range(2))
    assert first.message.content[0].text == second.message.content[0].text


def test_v2_tells_log_probabilities(v2: cohere.ClientV2) -> None:
    answer = v2.chat(messages=[USER], logprobs=True, **GREEDY)
    events = v2.chat_stream(messages=[USER], logprobs=True, **GREEDY)

    items = answer.logprobs
    assert "".join(item.text for item in items).startswith(answer.message.content[0].text)
    for item in items:
        assert len(item.token_ids) == len(item.logprobs) > 0
        assert all(token >= 0 for token in item.token_ids)
        assert all(logprob <= 0 for logprob in item.logprobs)
    streamed = [event.logprobs for event in events if event.type == "content-delta" and event.logprobs is not None]
    assert [token for item in streamed for token in item.token_ids] == [
        token for item in items for token in item.token_ids
    ]


async def test_the_asynchronous_clients_chat_alike() -> None:
    async with cohere.AsyncClientV2() as v2, cohere.AsyncClient() as v1:
        whole, old = await asyncio.gather(v2.chat(messages=[USER], **GREEDY), v1.chat(message=QUESTION, **GREEDY))
        pieces = [
            event.delta.message.content.text
            async for event in v2.chat_stream(messages=[USER], **GREEDY)
            if event.type == "content-delta"
        ]

    assert "".join(pieces) == whole.message.content[0].text == old.text


def test_v1_answers_with_its_history(v1: cohere.Client) -> None:
    answer = v1.chat(message=QUESTION, **GREEDY)

    assert answer.text
    assert answer.generation_id
    assert answer.finish_reason in {"COMPLETE", "MAX_TOKENS"}
    assert [(one.role, one.message) for one in answer.chat_history] == [("USER", QUESTION), ("CHATBOT", answer.text)]
    assert answer.meta.tokens.input_tokens > 0
    assert answer.meta.billed_units.output_tokens == answer.meta.tokens.output_tokens
    again = v1.chat(message="And of Norway?", chat_history=answer.chat_history, preamble="You are brief.", **GREEDY)
    assert [one.role for one in again.chat_history] == ["USER", "CHATBOT", "USER", "CHATBOT"]
    assert again.meta.tokens.input_tokens > answer.meta.tokens.input_tokens


def test_v1_streams_what_it_answers(v1: cohere.Client) -> None:
    whole = v1.chat(message=QUESTION, **GREEDY)
    events = list(v1.chat_stream(message=QUESTION, **GREEDY))

    kinds = [event.event_type for event in events]
    assert (kinds[0], kinds[-1], set(kinds[1:-1])) == ("stream-start", "stream-end", {"text-generation"})
    assert "".join(event.text for event in events[1:-1]) == whole.text == events[-1].response.text
    assert events[0].generation_id == events[-1].response.generation_id
    assert events[-1].response.meta == whole.meta


def test_v1_answers_in_the_form_of_a_schema(v1: cohere.Client) -> None:
    form: Any = {"type": "json_object", "schema": FORM}
    assert json.loads(v1.chat(message=QUESTION, response_format=form, **GREEDY).text)["city"] in CITIES


def test_v1_reads_the_results_of_tools(v1: cohere.Client) -> None:
    city = cohere.ToolParameterDefinitionsValue(type="str", description="Its name", required=True)
    tool = cohere.Tool(name="weather", description="Of a city", parameter_definitions={"city": city})
    call = cohere.ToolCall(name="weather", parameters={"city": "Paris"})
    result = cohere.ToolResult(call=call, outputs=[{"weather": "fine"}])

    answer = v1.chat(message=QUESTION, tools=[tool], tool_results=[result], force_single_step=True, **GREEDY)
    assert answer.text
    assert answer.tool_calls is None
    assert [one.role for one in answer.chat_history] == ["USER", "TOOL", "CHATBOT"]


def test_bad_input_is_a_bad_request(v1: cohere.Client, v2: cohere.ClientV2) -> None:
    image: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
    with pytest.raises(BadRequestError) as stops:
        v2.chat(messages=[USER], stop_sequences=["a"] * 6, **GREEDY)
    with pytest.raises(BadRequestError) as part:
        v2.chat(messages=[image], **GREEDY)
    with pytest.raises(BadRequestError) as streamed:
        list(v2.chat_stream(messages=[], **GREEDY))
    with pytest.raises(BadRequestError) as stored:
        v1.chat(message=QUESTION, conversation_id="c", **GREEDY)
    with pytest.raises(BadRequestError) as lines:
        list(v1.chat_stream(message="", **GREEDY))

    for caught, field in (
        (stops, "stop_sequences"),
        (part, "messages[0].content[0]"),
        (streamed, "messages"),
        (stored, "conversation_id"),
        (lines, "message"),
    ):
        assert field in caught.value.body["message"]


def test_an_unknown_model_is_not_found(v1: cohere.Client, v2: cohere.ClientV2) -> None:
    with pytest.raises(NotFoundError) as whole:
        v2.chat(model="nobody/knows-it", messages=[USER])
    with pytest.raises(NotFoundError):
        list(v2.chat_stream(model="nobody/knows-it", messages=[USER]))
    with pytest.raises(NotFoundError):
        list(v1.chat_stream(model="nobody/knows-it", message=QUESTION))
    assert "nobody/knows-it" in whole.value.body["message"]
