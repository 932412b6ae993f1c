"""`POST /v1/chat/completions`: what is refused, what a body becomes, and answers as OpenAI's client reads them."""

import json
from collections.abc import Sequence
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessageFunctionToolCall
from pydantic import BaseModel

from appliance.compat import formats
from appliance.compat.generation import Call, Gathering, Generated
from appliance.compat.openai_chat import CHOICES_MAX, TOP_LOGPROBS_MAX, ChatBody, ChatCall, decode
from appliance.compat.openai_chat_answer import ChatAnswer
from appliance.compat.responses_settings import SCHEMA_LEVELS_MAX
from appliance.compat.sampling import BIASES_MAX, STOP_CHARS_MAX, STOPS_MAX
from appliance.errors import (
    ApplianceError,
    EngineFailed,
    InvalidRequest,
    MalformedBody,
    Overloaded,
    UnsupportedParameter,
)
from appliance.jobs import CallPart, Candidate, Chosen, Delta, Done, Generate, Sampling, Usage

Json = dict[str, Any]  # `Any`: JSON
Story = tuple[Sequence[Delta], Done]

HI: Json = {"role": "user", "content": "Hi"}
SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Json = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA, "strict": True}}
FORMAT: Json = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
FUNCTIONS: Json = {"functions": [{"name": "weather", "parameters": SCHEMA}]}
USAGE = Usage(input_tokens=7, output_tokens=5, cached_tokens=4, reasoning_tokens=2)
TOLD: Json = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 2},
}
EURO = (
    Chosen(b"\xe2\x82", -0.25, (Candidate(b"\xe2\x82", -0.25), Candidate(b"Hi", -2.0))),
    Chosen(b"\xac", -0.5, (Candidate(b"\xac", -0.5),)),
)

SAID: Story = ([Delta("Hel", logprobs=()), Delta("lo")], Done(USAGE))
NOTHING: Story = ([], Done(USAGE))
CUT: Story = ([Delta("Hel")], Done(USAGE, finish="length"))
THOUGHT: Story = ([Delta(reasoning="Hm"), Delta("Y", reasoning="m."), Delta("es.")], Done(USAGE))
WEIGHED: Story = ([Delta("", logprobs=EURO[:1]), Delta("€", logprobs=EURO[1:])], Done(USAGE))
CALLED: Story = (
    [
        Delta("I will look. "),
        Delta(calls=(CallPart(0, "weather"), CallPart(0, "", '{"city":'))),
        Delta(calls=(CallPart(0, "", '"Bonn"}'), CallPart(1, "time", "{}"))),
    ],
    Done(USAGE, finish="tool_calls"),
)
CALLED_ONLY: Story = (
    [Delta(calls=(CallPart(0, "weather"),)), Delta(calls=(CallPart(0, "", '{"city":"Bonn"}'),))],
    Done(USAGE, finish="tool_calls"),
)
STORIES = [SAID, NOTHING, CUT, THOUGHT, WEIGHED, CALLED, CALLED_ONLY]


def body(**fields: object) -> bytes:
    """A valid body with these fields laid over it."""
    return json.dumps({"model": "m", "messages": [HI]} | fields).encode()


def read(**fields: object) -> ChatCall:
    return decode(body(**fields))


def task(**fields: object) -> Generate:
    (found,) = read(**fields).tasks
    return found


def gathered(story: Story) -> Generated:
    gathering = Gathering()
    for delta in story[0]:
        gathering.add(delta)
    return gathering.whole(story[1])


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"[]",
        b"{",
        b'{"model":"m","messages":NaN}',
        b'{"model":"m","messages":[{"role":"user","content":"\xff"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"\\ud800"}]}',
        b'{"model":"m","messages":[{"role":"user","content":"Hi","x":' + b"[" * 10**5 + b"]" * 10**5 + b"}]}",
        b'{"model":"m","messages":' + b"[" * 10**5 + b"]" * 10**5 + b"}",
    ],
)
def test_what_is_no_json_object_is_malformed(sent: bytes) -> None:
    with pytest.raises(MalformedBody, match="the request body"):
        decode(sent)


def form(**fields: object) -> Json:
    """A `response_format` of a schema, with these fields laid over it."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA} | fields}}


def deep(levels: int) -> Json:
    """So many objects, one in another."""
    found: Json = {}
    for _ in range(levels - 1):
        found = {"not": found}
    return found


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 5}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [HI, {"role": "robot", "content": "Hi"}]}, "messages[1].role"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"),
        ({"presence_penalty": -2.1}, "presence_penalty"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": CHOICES_MAX + 1}, "n"),
        ({"n": True}, "n"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 0.5}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": ["a", ""]}, "stop[1]"),
        ({"stop": ["a"] * (STOPS_MAX + 1)}, "stop"),
        ({"stop": "a" * (STOP_CHARS_MAX + 1)}, "stop"),
        ({"stop": [5]}, "stop[0]"),
        ({"logit_bias": {"1": 100.5}}, "logit_bias"),
        ({"logit_bias": {"1": -101}}, "logit_bias"),
        ({"logit_bias": {"the": 1}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {str(token): 1 for token in range(BIASES_MAX + 1)}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"top_logprobs": 0, "logprobs": False}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": TOP_LOGPROBS_MAX + 1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 5}, "logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"response_format": "json_object"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "regex"}}, "response_format.pattern"),
        ({"response_format": {"type": "regex", "pattern": ""}}, "response_format.pattern"),
        (form(name=None), "response_format.json_schema.name"),
        (form(name="a b"), "response_format.json_schema.name"),
        (form(name="n" * 65), "response_format.json_schema.name"),
        (form(schema=None), "response_format.json_schema.schema"),
        (form(schema=[]), "response_format.json_schema.schema"),
        (form(schema=True), "response_format.json_schema.schema"),
        (form(schema=deep(SCHEMA_LEVELS_MAX + 1)), "response_format.json_schema.schema"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": {}}, "tools"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [], "tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
        ({"function_call": {"name": "weather"}}, "function_call"),
        ({"tools": [WEATHER], "function_call": {"name": "weather"}}, "function_call"),
        (FUNCTIONS | {"function_call": {"name": "f"}}, "function_call"),
        (FUNCTIONS | {"function_call": "required"}, "function_call"),
        (FUNCTIONS | {"tools": [WEATHER]}, "tools"),
        (FUNCTIONS | {"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "a b"}]}, "functions[0].name"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param
    assert param in caught.value.message
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio"),
        ({"web_search_options": {}}, "web_search_options"),
        ({"moderation": {}}, "moderation"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"modalities": []}, "modalities"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: Json, param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        read(**fields)
    assert caught.value.param == param
    assert f"'{param.removesuffix('.type')}'" in caught.value.message


def test_a_missing_field_is_named() -> None:
    for name in ("model", "messages"):
        fields = {"model": "m", "messages": [HI]}
        del fields[name]
        with pytest.raises(InvalidRequest, match=f"missing required field '{name}'") as caught:
            decode(json.dumps(fields).encode())
        assert caught.value.param == name


NULLABLE = sorted(set(ChatBody.__struct_fields__) - {"model", "messages"})


def test_explicit_nulls_mean_absent() -> None:
    found = read(**dict.fromkeys(NULLABLE))
    assert found.tasks == read().tasks
    assert (found.is_streamed, found.is_legacy, found.ignored) == (False, False, ())


def test_a_bare_body_leaves_all_open() -> None:
    assert task() == Generate(messages=json.dumps([HI]).encode())


def test_messages_travel_as_they_were_written() -> None:
    written = b'[ {"role" :"user", "content":"\\u00e9 \xc3\xa9", "mine": 1e400} ]'
    (found,) = decode(b'{"messages":' + written + b',"model":"m"}').tasks
    assert found.messages == written


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 9}, {"tokens_max": 9}),
        ({"max_completion_tokens": 8}, {"tokens_max": 8}),
        ({"max_tokens": 9, "max_completion_tokens": 8}, {"tokens_max": 8}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b", "c", "d"]}, {"stop": ("a", "b", "c", "d")}),
        ({"stop": []}, {}),
        ({"logprobs": True}, {"top_logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 20}, {"top_logprobs": 20}),
        ({"logprobs": False}, {}),
        ({"stream": True}, {"is_streamed": True}),
        ({"parallel_tool_calls": False}, {"has_parallel_calls": False}),
        ({"parallel_tool_calls": True}, {}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"form": "json_object"}),
        ({"response_format": {"type": "regex", "pattern": "[é]+"}}, {"form": "regex", "pattern": "[é]+".encode()}),
        ({"temperature": 0}, {"sampling": Sampling(temperature=0)}),
        ({"temperature": 2, "top_p": 0.25}, {"sampling": Sampling(temperature=2, top_p=0.25)}),
        ({"top_k": -1}, {}),
        ({"top_k": 5, "min_p": 0.5}, {"sampling": Sampling(top_k=5, min_p=0.5)}),
        ({"repetition_penalty": 1.5}, {"sampling": Sampling(repetition_penalty=1.5)}),
        (
            {"frequency_penalty": -2, "presence_penalty": 2},
            {"sampling": Sampling(frequency_penalty=-2, presence_penalty=2)},
        ),
        ({"seed": 0}, {"sampling": Sampling(seed=0)}),
        ({"seed": -1}, {"sampling": Sampling(seed=2**63 - 1)}),
        ({"logit_bias": {"5": -100, "7": 0.5}}, {"sampling": Sampling(logit_bias=((5, -100.0), (7, 0.5)))}),
        ({"logit_bias": {}}, {}),
        ({"tools": []}, {}),
        ({"tools": [], "tool_choice": "none"}, {}),
        ({"functions": [], "function_call": "auto"}, {}),
    ],
)
def test_what_fields_become(fields: Json, expected: Json) -> None:
    assert task(**fields) == msgspec.structs.replace(task(), **expected)


def test_a_schema_keeps_its_order_and_numbers() -> None:
    schema = {"type": "object", "properties": {"b": {"const": 2**70}, "a": {"const": 0.1}}}
    found = task(**form(schema=schema))
    assert found.form == "json_schema"
    assert json.dumps(json.loads(found.pattern)) == json.dumps(schema)


def test_tools_are_offered() -> None:
    found = task(tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert json.loads(found.tools) == [WEATHER]
    assert (found.tool_choice, found.tool_name, found.has_parallel_calls) == ("required", "weather", True)


def test_functions_as_they_were_are_tools_called_one_at_a_time() -> None:
    call = read(**FUNCTIONS, function_call={"name": "weather"})
    (found,) = call.tasks
    assert json.loads(found.tools) == [{"type": "function", "function": FUNCTIONS["functions"][0]}]
    assert (found.tool_choice, found.tool_name, found.has_parallel_calls) == ("required", "weather", False)
    assert call.is_legacy


def test_choices_have_seeds_of_their_own() -> None:
    assert [each.sampling.seed for each in read(n=3, seed=2**63 - 2).tasks] == [2**63 - 2, 2**63 - 1, 0]
    assert [each.sampling.seed for each in read(n=2).tasks] == [None, None]
    assert len(read(n=CHOICES_MAX).tasks) == CHOICES_MAX


def test_what_changes_nothing_is_taken_and_the_rest_is_named() -> None:
    harmless = {
        "metadata": {"a": "b"},
        "prediction": {"type": "content", "content": "x"},
        "prompt_cache_key": "k",
        "prompt_cache_retention": "24h",
        "safety_identifier": "s",
        "service_tier": "auto",
        "store": True,
        "user": "u",
        "modalities": ["text"],
    }
    assert read(**harmless).tasks == read().tasks
    assert read(**harmless).ignored == ()
    found = read(reasoning_effort="low", verbosity="high", chat_template="{{ x }}")
    assert found.tasks == read().tasks
    assert set(found.ignored) == {"reasoning_effort", "verbosity", "chat_template"}


def stream_of(call: ChatCall, *stories: Story, error: ApplianceError | None = None) -> bytes:
    """The bytes of a stream, a choice after the other; an error may end it in place of the end."""
    writer = call.writer(model="m", created_s=123)
    told = [writer.start()]
    for number, (deltas, done) in enumerate(stories):
        told += [writer.delta(number, delta) for delta in deltas]
        told += [] if error is not None else [writer.finish(number, done)]
    return b"".join([*told, writer.end() if error is None else writer.error(error)])


def client_for(content: bytes, content_type: str) -> openai.OpenAI:
    """OpenAI's client, which validates strictly and reads this from whatever it asks."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=content, headers={"content-type": content_type})

    return openai.OpenAI(
        api_key="k",
        base_url="http://localhost/v1",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(answer)),
        _strict_response_validation=True,
    )


def written(*stories: Story, **fields: object) -> bytes:
    """The answer as it is sent."""
    answer = read(**fields).answer([gathered(story) for story in stories], model="m", created_s=123)
    return formats.encode(answer, "json")


def answered(*stories: Story, **fields: object) -> ChatCompletion:
    """The answer as OpenAI's client reads it."""
    with client_for(written(*stories, **fields), "application/json") as client:
        return client.chat.completions.create(model="m", messages=[])


def streamed(*stories: Story, error: ApplianceError | None = None, **fields: object) -> list[ChatCompletionChunk]:
    """The chunks as OpenAI's client reads them."""
    content = stream_of(read(stream=True, **fields), *stories, error=error)
    with client_for(content, "text/event-stream") as client:
        return list(client.chat.completions.create(model="m", messages=[], stream=True))


def test_an_answer_to_the_letter() -> None:
    found = json.loads(written(SAID))
    assert found.pop("id").startswith("chatcmpl-")
    assert found == {
        "object": "chat.completion",
        "created": 123,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": TOLD,
        "system_fingerprint": None,
    }


@pytest.mark.parametrize("story", STORIES)
def test_answers_are_valid_to_openai(story: Story) -> None:
    found = answered(story)
    assert found.choices[0].message.content == (gathered(story).text or (None if gathered(story).calls else ""))
    assert found.choices[0].finish_reason == story[1].finish


def test_functions_are_called_by_ids_of_their_own() -> None:
    (choice,) = answered(CALLED).choices
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I will look. "
    functions = [call for call in calls if isinstance(call, ChatCompletionMessageFunctionToolCall)]
    assert [(call.function.name, call.function.arguments) for call in functions] == [
        ("weather", '{"city":"Bonn"}'),
        ("time", "{}"),
    ]
    assert all(call.id.startswith("call_") for call in calls)
    assert (
        len({call.id for call in calls} | {call.id for call in answered(CALLED).choices[0].message.tool_calls or []})
        == 4
    )


def test_an_answer_of_calls_alone_has_no_content() -> None:
    message = json.loads(written(CALLED_ONLY))["choices"][0]["message"]
    assert message["content"] is None
    assert "tool_calls" not in json.loads(written(SAID))["choices"][0]["message"]


def test_functions_as_they_were_are_called_as_they_were() -> None:
    (choice,) = answered(CALLED_ONLY, **FUNCTIONS).choices
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call is not None
    assert choice.message.function_call.to_dict() == {"name": "weather", "arguments": '{"city":"Bonn"}'}


def test_reasoning_is_told_apart() -> None:
    message = json.loads(written(THOUGHT))["choices"][0]["message"]
    assert (message["content"], message["reasoning_content"]) == ("Yes.", "Hmm.")
    assert "reasoning_content" not in json.loads(written(SAID))["choices"][0]["message"]


def test_log_probabilities_tell_bytes() -> None:
    logprobs = json.loads(written(WEIGHED, logprobs=True, top_logprobs=2))["choices"][0]["logprobs"]
    assert logprobs == {
        "content": [
            {
                "token": "�",
                "logprob": -0.25,
                "bytes": [0xE2, 0x82],
                "top_logprobs": [
                    {"token": "�", "logprob": -0.25, "bytes": [0xE2, 0x82]},
                    {"token": "Hi", "logprob": -2.0, "bytes": [72, 105]},
                ],
            },
            {
                "token": "�",
                "logprob": -0.5,
                "bytes": [0xAC],
                "top_logprobs": [{"token": "�", "logprob": -0.5, "bytes": [0xAC]}],
            },
        ],
        "refusal": None,
    }
    assert json.loads(written(NOTHING, logprobs=True))["choices"][0]["logprobs"] == {"content": [], "refusal": None}
    assert answered(WEIGHED, logprobs=True).choices[0].logprobs is not None


def test_a_prompt_counts_once() -> None:
    found = answered(SAID, CUT, CALLED, n=3)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert [choice.finish_reason for choice in found.choices] == ["stop", "length", "tool_calls"]
    assert found.usage is not None
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (7, 15, 22)


def test_an_answer_is_the_same_in_both_forms() -> None:
    answer = read(logprobs=True).answer([gathered(CALLED)], model="m", created_s=1)
    packed, text = formats.encode(answer, "msgpack"), formats.encode(answer, "json")
    assert msgspec.msgpack.decode(packed) == json.loads(text)


def chunks(content: bytes) -> list[Json]:
    """The chunks of a stream that ends well, checked for its frame and for what they share."""
    assert content.endswith(b"\n\ndata: [DONE]\n\n")
    found: list[Json] = []
    for event in content.removesuffix(b"data: [DONE]\n\n").removesuffix(b"\n\n").split(b"\n\n"):
        assert event.startswith(b"data: ")
        assert b"\n" not in event
        found.append(json.loads(event[6:]))
    shared = {(chunk.pop("id"), chunk.pop("object"), chunk.pop("created"), chunk.pop("model")) for chunk in found}
    ((name, kind, created_s, model),) = shared
    assert (kind, created_s, model) == ("chat.completion.chunk", 123, "m")
    assert name.startswith("chatcmpl-")
    assert all(chunk.pop("system_fingerprint") is None for chunk in found)
    return found


def said(delta: Json, index: int = 0, finish: str | None = None) -> Json:
    """A chunk, but for what all share."""
    return {"choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}]}


def test_the_chunks_of_a_text() -> None:
    assert chunks(stream_of(read(stream=True), SAID)) == [
        said({"role": "assistant", "content": ""}),
        said({"content": "Hel"}),
        said({"content": "lo"}),
        said({}, finish="stop"),
    ]


def test_the_chunks_of_a_thought() -> None:
    assert chunks(stream_of(read(stream=True), THOUGHT)) == [
        said({"role": "assistant", "content": ""}),
        said({"reasoning_content": "Hm"}),
        said({"reasoning_content": "m."}),
        said({"content": "Y"}),
        said({"content": "es."}),
        said({}, finish="stop"),
    ]


def test_the_chunks_of_calls() -> None:
    """A call is announced without arguments, with an id that comes once."""
    found = chunks(stream_of(read(stream=True), CALLED))
    ids = [
        call.pop("id") for chunk in found for call in chunk["choices"][0]["delta"].get("tool_calls", ()) if "id" in call
    ]
    assert len(set(ids)) == 2
    assert found[2:] == [
        said({"tool_calls": [{"index": 0, "type": "function", "function": {"name": "weather", "arguments": ""}}]}),
        said({"tool_calls": [{"index": 0, "function": {"arguments": '{"city":'}}]}),
        said({"tool_calls": [{"index": 0, "function": {"arguments": '"Bonn"}'}}]}),
        said({"tool_calls": [{"index": 1, "type": "function", "function": {"name": "time", "arguments": ""}}]}),
        said({"tool_calls": [{"index": 1, "function": {"arguments": "{}"}}]}),
        said({}, finish="tool_calls"),
    ]


def test_the_chunks_of_a_function_as_it_was() -> None:
    assert chunks(stream_of(read(stream=True, **FUNCTIONS), CALLED_ONLY))[1:] == [
        said({"function_call": {"name": "weather", "arguments": ""}}),
        said({"function_call": {"arguments": '{"city":"Bonn"}'}}),
        said({}, finish="function_call"),
    ]


def test_each_choice_is_announced_and_chunks_are_of_one_choice() -> None:
    found = chunks(stream_of(read(stream=True, n=2), SAID, CUT))
    assert found[:2] == [said({"role": "assistant", "content": ""}, index) for index in (0, 1)]
    assert [chunk["choices"][0]["index"] for chunk in found[2:]] == [0, 0, 0, 1, 1]
    assert found[-1] == said({}, 1, finish="length")


def test_usage_comes_last_where_it_is_asked_for() -> None:
    asked = read(stream=True, n=2, stream_options={"include_usage": True})
    *parts, last = chunks(stream_of(asked, SAID, CUT))
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert last["usage"] == TOLD | {
        "completion_tokens": 10,
        "total_tokens": 17,
        "completion_tokens_details": {"reasoning_tokens": 4},
    }
    for options in (None, {}, {"include_usage": False}):
        assert all("usage" not in part for part in chunks(stream_of(read(stream=True, stream_options=options), SAID)))


def test_log_probabilities_come_with_their_tokens_even_without_text() -> None:
    found = chunks(stream_of(read(stream=True, logprobs=True), WEIGHED))
    weighed = [chunk["choices"][0] for chunk in found if chunk["choices"][0]["logprobs"]]
    assert [choice["delta"] for choice in weighed] == [{"content": ""}, {"content": "€"}]
    told = [token["bytes"] for choice in weighed for token in choice["logprobs"]["content"]]
    assert bytes(byte for token in told for byte in token).decode() == "€"


@pytest.mark.parametrize("story", STORIES)
def test_chunks_are_valid_to_openai(story: Story) -> None:
    found = streamed(story, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in found[:-1]) == gathered(story).text


@pytest.mark.parametrize("error", [EngineFailed("the engine died"), Overloaded("too slow a reader")])
def test_a_failure_in_mid_stream_is_raised_by_the_client(error: ApplianceError) -> None:
    content = stream_of(read(stream=True), SAID, error=error)
    assert b"[DONE]" not in content
    assert content.endswith(b"\n\n")
    with pytest.raises(openai.APIError, match=error.message) as caught:
        streamed(SAID, error=error)
    assert caught.value.code == error.code


class Place(BaseModel):
    """What `parse` reads."""

    city: str


def test_the_stream_helper_parses_what_it_asked_for() -> None:
    content = stream_of(read(stream=True), ([Delta('{"city":'), Delta(' "Bonn"}')], Done()))
    with (
        client_for(content, "text/event-stream") as client,
        client.chat.completions.stream(model="m", messages=[], response_format=Place) as stream,
    ):
        assert stream.get_final_completion().choices[0].message.parsed == Place(city="Bonn")


def test_the_stream_helper_says_where_an_answer_was_cut() -> None:
    content = stream_of(read(stream=True), ([Delta('{"city":')], Done(finish="length")))
    with (
        client_for(content, "text/event-stream") as client,
        client.chat.completions.stream(model="m", messages=[], response_format=Place) as stream,
        pytest.raises(openai.LengthFinishReasonError),
    ):
        stream.get_final_completion()


def test_log_probabilities_are_told_even_where_the_text_did_not_grow() -> None:
    unseen = Delta(calls=(CallPart(0),), logprobs=tuple(EURO))
    chunks = streamed(([Delta(calls=(CallPart(0, "weather"),)), unseen], Done()), logprobs=True)
    told = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs is not None]
    assert len(told) == 1
    assert len(told[0].content or []) == len(unseen.logprobs)


# A call's part either begins the next call, or goes on with the last.
DRAWN = st.tuples(
    st.integers(0, 2),
    st.text(max_size=3),
    st.text(max_size=3),
    st.lists(st.tuples(st.booleans(), st.text(max_size=3)), max_size=2),
    st.lists(st.builds(Chosen, st.binary(max_size=3), st.sampled_from([-0.5, 0.0])), max_size=2),
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.lists(DRAWN, max_size=12))
def test_a_stream_adds_up_to_the_answer(
    drawn: list[tuple[int, str, str, list[tuple[bool, str]], list[Chosen]]],
) -> None:
    """Whatever order the parts of three choices come in, by OpenAI's own addition."""
    writer = read(stream=True, n=3, logprobs=True).writer(model="m", created_s=123)
    gatherings = [Gathering() for _ in range(3)]
    begun = [0, 0, 0]
    content = writer.start()
    for number, text, reasoning, parts, logprobs in drawn:
        calls: list[CallPart] = []
        for begins, arguments in parts:
            is_next = begins or not begun[number]
            begun[number] += is_next
            calls.append(CallPart(begun[number] - 1, "f" if is_next else "", arguments))
        delta = Delta(text, reasoning, tuple(calls), tuple(logprobs))
        gatherings[number].add(delta)
        content += writer.delta(number, delta)
    content += b"".join(writer.finish(number, Done(USAGE)) for number in range(3)) + writer.end()
    state: ChatCompletionStreamState[None] = ChatCompletionStreamState()
    for event in content.removesuffix(b"\n\ndata: [DONE]\n\n").split(b"\n\n"):
        state.handle_chunk(ChatCompletionChunk.model_validate_json(event.removeprefix(b"data: "), strict=True))
    for choice, gathering in zip(state.current_completion_snapshot.choices, gatherings, strict=True):
        whole = gathering.whole(Done(USAGE))
        assert choice.message.content == whole.text
        assert choice.message.to_dict().get("reasoning_content", "") == whole.reasoning
        calls_told = [Call(each.function.name, each.function.arguments) for each in choice.message.tool_calls or ()]
        assert tuple(calls_told) == whole.calls
        tokens = choice.logprobs.content if choice.logprobs is not None else None
        assert [bytes(token.bytes or []) for token in tokens or []] == [token.data for token in whole.logprobs]


# Of all levels, so that chance finds its way into them.
WORDS = [
    *(
        "type",
        "name",
        "role",
        "content",
        "text",
        "id",
        "arguments",
        "function",
        "schema",
        "json_schema",
        "mode",
        "tools",
    ),
    *("message", "user", "assistant", "tool", "tool_calls", "tool_call_id", "allowed_tools", "pattern", "regex", "5"),
]

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=4),
    max_leaves=12,
)


def fault(fields: Json) -> str | None:
    """The field that is refused; None if the body is read, and answered."""
    try:
        call = read(**fields)
    except InvalidRequest as error:
        return (error.param or "").split(".")[0].split("[")[0]
    answer = call.answer([gathered(SAID)] * len(call.tasks), model="m", created_s=1)
    ChatCompletion.model_validate_json(formats.encode(answer, "json"), strict=True)
    return None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*NULLABLE, "messages"]), JSON, min_size=1, max_size=3))
def test_whatever_is_sent_is_read_or_refused_by_name(fields: Json) -> None:
    """Never another exception, which would be a 500."""
    assert fault(fields) in {None, *fields}


def test_body_and_answer_have_a_schema() -> None:
    """As the OpenAPI document wants of them."""
    _, components = msgspec.json.schema_components([ChatBody, ChatAnswer])
    assert {"ChatBody", "ChatAnswer", "ChatChoice", "ResponseFormat"} <= set(components)
