"""OpenAI's Python client chats, asks for responses, goes on with texts and decides; both of its lines.

The model is small and often wrong, so the answers are held to their form and to each other, not to what they say.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from openai import AzureOpenAI, OpenAI
from pydantic import BaseModel

from tests.sdk.python.appliance_facts import ALIAS, GPT, KEY, URL

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY: dict[str, Any] = {"model": GPT, "temperature": 0, "max_tokens": 48}
FORM: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": FORM, "strict": True}}
FORCED: Any = {"type": "function", "function": {"name": "weather"}}


class City(BaseModel):
    city: Literal["Paris", "Oslo"]


@pytest.fixture
def client() -> Iterator[OpenAI]:
    """Knows the appliance by OPENAI_BASE_URL and OPENAI_API_KEY alone."""
    with OpenAI() as client:
        yield client


def test_a_stream_says_what_the_answer_says(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=QUESTION, **GREEDY)
    chunks = list(
        client.chat.completions.create(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )

    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == said
    assert whole.model == GPT
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_what_is_parsed_is_of_its_type(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(messages=QUESTION, response_format=City, **GREEDY)
    with client.chat.completions.stream(messages=QUESTION, response_format=City, **GREEDY) as stream:
        streamed = stream.get_final_completion()

    assert isinstance(parsed.choices[0].message.parsed, City)
    assert streamed.choices[0].message.parsed == parsed.choices[0].message.parsed


def test_a_function_is_called_and_answered(client: OpenAI) -> None:
    whole = client.chat.completions.create(messages=QUESTION, tools=[WEATHER], tool_choice=FORCED, **GREEDY)
    with client.chat.completions.stream(messages=QUESTION, tools=[WEATHER], tool_choice=FORCED, **GREEDY) as stream:
        events = [event.type for event in stream]
        streamed = stream.get_final_completion()

    assert whole.choices[0].message.tool_calls is not None
    (call,) = whole.choices[0].message.tool_calls
    assert call.type == "function"
    City.model_validate_json(call.function.arguments)
    assert streamed.choices[0].message.tool_calls is not None
    assert streamed.choices[0].message.tool_calls[0].function.arguments == call.function.arguments
    assert "tool_calls.function.arguments.done" in events
    answered = client.chat.completions.create(
        messages=[
            *QUESTION,
            {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
            {"role": "tool", "tool_call_id": call.id, "content": '{"sky": "blue"}'},
        ],
        tools=[WEATHER],
        tool_choice="none",
        **GREEDY,
    )
    assert answered.choices[0].message.content


def test_choices_seeds_stops_and_log_probabilities(client: OpenAI) -> None:
    first, second = (
        client.chat.completions.create(
            model=GPT, messages=QUESTION, n=2, seed=3, temperature=1.2, max_tokens=8, logprobs=True, top_logprobs=2
        )
        for _ in range(2)
    )
    whole = client.chat.completions.create(messages=QUESTION, **GREEDY).choices[0].message.content or ""
    stopped = client.chat.completions.create(messages=QUESTION, stop=whole[5:9], **GREEDY)

    assert [choice.message.content for choice in first.choices] == [choice.message.content for choice in second.choices]
    logprobs = first.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert all(len(token.top_logprobs) == 2 for token in logprobs.content)
    assert stopped.choices[0].message.content == whole[: whole.index(whole[5:9])]


def test_errors_are_the_clients_own(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="nobody", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as long:
        client.chat.completions.create(model=GPT, messages=[{"role": "user", "content": "word " * 9000}], stream=True)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=ALIAS, messages=QUESTION)

    assert missing.value.code == "model_not_found"
    assert long.value.code == "context_length_exceeded"
    assert "/v1/embeddings" in wrong.value.message


def test_responses_whole_streamed_and_parsed(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": GPT, "input": "Say hello.", "max_output_tokens": 16, "temperature": 0}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
    parsed = client.responses.parse(model=GPT, input="A capital?", text_format=City, max_output_tokens=32)

    assert whole.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] in {"response.completed", "response.incomplete"}
    assert isinstance(parsed.output_parsed, City)


def test_a_response_calls_a_function_and_hears_of_it(client: OpenAI) -> None:
    tool: Any = {"type": "function", "name": "weather", "parameters": FORM, "strict": True}
    called = client.responses.create(
        model=GPT, input="Weather?", tools=[tool], tool_choice={"type": "function", "name": "weather"}
    )
    (call,) = [item for item in called.output if item.type == "function_call"]
    heard = client.responses.create(
        model=GPT,
        input=[
            {"role": "user", "content": "Weather?"},
            {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments},
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ],
        max_output_tokens=8,
    )

    assert json.loads(call.arguments)["city"] in {"Paris", "Oslo"}
    assert heard.output_text


def test_texts_are_gone_on_with(client: OpenAI) -> None:
    answer = client.completions.create(model=GPT, prompt=["One, two,", "A, B,"], n=2, max_tokens=4, echo=True)
    weighed = client.completions.create(model=GPT, prompt="One, two,", max_tokens=4, logprobs=1)
    streamed = client.completions.create(model=GPT, prompt="One, two,", max_tokens=4, stream=True, temperature=0)

    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text[:5] for choice in answer.choices] == ["One, ", "One, ", "A, B,", "A, B,"]
    assert "".join(chunk.choices[0].text for chunk in streamed)
    assert weighed.choices[0].logprobs is not None
    assert "".join(weighed.choices[0].logprobs.tokens or []) == weighed.choices[0].text


def test_azures_client_chats() -> None:
    with AzureOpenAI(azure_endpoint=URL, api_key=KEY, api_version="2024-10-21", azure_deployment=GPT) as client:
        whole = client.chat.completions.create(messages=QUESTION, **GREEDY).choices[0].message.content
        chunks = client.chat.completions.create(messages=QUESTION, stream=True, **GREEDY)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole


@pytest.mark.skipif(not hasattr(OpenAI, "decisions"), reason="of a later line of the client")
def test_decisions(client: OpenAI) -> None:
    decided = client.decisions.create(
        model=GPT,
        input="I love it!",
        questions=[
            {"type": "predicate", "instructions": "It is praise", "name": "praise"},
            {"type": "choice", "instructions": "Of what?", "choices": [{"value": "a"}, {"value": True}]},
        ],
    )

    predicate, choice = decided.answers
    assert predicate.type == "predicate"
    assert 0 <= predicate.probability <= 1
    assert choice.type == "choice"
    assert choice.choice in ("a", True)
