"""`POST /v1/responses`: what is refused, what a conversation becomes, and answers as OpenAI's client reads them."""

import json
from collections.abc import Sequence
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import (
    Response,
    ResponseFunctionToolCall,
    ResponseOutputMessage,
    ResponseReasoningItem,
)
from pydantic import BaseModel

from appliance.compat import formats
from appliance.compat.generation import Call, Gathering, Generated
from appliance.compat.openai_responses import METADATA_MAX, ResponsesBody, ResponsesCall, decode
from appliance.compat.responses_answer import Response as WholeResponse
from appliance.compat.responses_settings import SCHEMA_LEVELS_MAX, TOOLS_MAX
from appliance.errors import (
    ApplianceError,
    EngineFailed,
    InvalidRequest,
    MalformedBody,
    Overloaded,
    TooLong,
    UnsupportedParameter,
)
from appliance.jobs import CallPart, Candidate, Chosen, Delta, Done, Generate, Sampling, Usage

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "weather", "description": "of a city", "parameters": SCHEMA, "strict": True}
OTHER = {"type": "function", "name": "time"}
CALL = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city":"Bonn"}'}
JSON_FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
USAGE = Usage(input_tokens=7, output_tokens=5, cached_tokens=4, reasoning_tokens=2)
HELLO = (
    Chosen(b"Hel", -0.25, (Candidate(b"Hel", -0.25), Candidate(b"\xf0\x9f", -2.0))),
    Chosen(b"lo", -0.5, (Candidate(b"lo", -0.5),)),
)


def body(**fields: object) -> bytes:
    """A valid body with these fields laid over it."""
    return json.dumps({"model": "m", "input": "Hi"} | fields).encode()


def read(**fields: object) -> ResponsesCall:
    return decode(body(**fields))


def task(**fields: object) -> Generate:
    (found,) = read(**fields).tasks
    return found


def messages(items: object, **fields: object) -> Any:
    """The chat that an input becomes, as JSON."""
    return json.loads(task(input=items, **fields).messages)


def said(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def deep(levels: int) -> dict[str, Any]:
    """So many objects, one in another."""
    found: dict[str, Any] = {}
    for _ in range(levels - 1):
        found = {"not": found}
    return found


def called(*ids: str) -> list[dict[str, object]]:
    function = {"name": "weather", "arguments": '{"city":"Bonn"}'}
    return [{"id": call_id, "function": function, "type": "function"} for call_id in ids]


@pytest.mark.parametrize("sent", [b"", b"[]", b"{", b'{"model":"m","input":NaN}', b'{"model":"m","input":"\xff"}'])
def test_what_is_no_json_object_is_malformed(sent: bytes) -> None:
    with pytest.raises(MalformedBody, match="the request body"):
        decode(sent)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": []}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"type": "reasoning", "id": "rs_1", "summary": []}]}, "input"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": []}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"text": "x"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "user", "content": [{"type": "input_text", "text": 5}]}]}, "input[0].content[0].text"),
        ({"input": [{"role": "assistant", "content": [{"type": "refusal"}]}]}, "input[0].content[0].refusal"),
        ({"input": [CALL | {"name": None}]}, "input[0].name"),
        ({"input": [CALL | {"arguments": None}]}, "input[0].arguments"),
        ({"input": [CALL | {"arguments": '{"ci'}]}, "input[0].arguments"),
        ({"input": [CALL | {"arguments": "[]"}]}, "input[0].arguments"),
        ({"input": [CALL | {"arguments": "[" * 100_000}]}, "input[0].arguments"),
        ({"input": [CALL | {"call_id": None}]}, "input[0].call_id"),
        ({"input": [OUTPUT]}, "input[0].call_id"),
        ({"input": [CALL, OUTPUT | {"call_id": None}]}, "input[1].call_id"),
        ({"input": [CALL, OUTPUT | {"call_id": "c2"}]}, "input[1].call_id"),
        ({"input": [CALL, OUTPUT | {"output": None}]}, "input[1].output"),
        ({"input": [CALL, OUTPUT | {"output": []}]}, "input[1].output"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 2**31}, "max_output_tokens"),
        ({"max_output_tokens": 10**30}, "max_output_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"include": ["everything"]}, "include[0]"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"name": ""}]}, "tools[0].name"),
        ({"tools": [TOOL | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"name": "a\n"}]}, "tools[0].name"),
        ({"tools": [TOOL | {"name": "a" * 65}]}, "tools[0].name"),
        ({"tools": [TOOL, OTHER, TOOL]}, "tools[2].name"),
        ({"tools": [TOOL | {"name": str(n)} for n in range(TOOLS_MAX + 1)]}, "tools"),
        ({"text": {"format": JSON_FORMAT | {"name": "a b"}}}, "text.format.name"),
        ({"tools": [TOOL | {"parameters": []}]}, "tools[0].parameters"),
        ({"tools": [TOOL | {"parameters": deep(SCHEMA_LEVELS_MAX + 1)}]}, "tools[0].parameters"),
        ({"text": {"format": JSON_FORMAT | {"schema": deep(SCHEMA_LEVELS_MAX + 1)}}}, "text.format.schema"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function", "name": "weather"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function", "name": "x"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto"}}, "tool_choice.tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}, "tools": [TOOL]},
            "tool_choice.tools[0].name",
        ),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"verbosity": "mute"}}, "text.verbosity"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(METADATA_MAX + 1)}}, "metadata"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
        ({"metadata": {"k": "v" * 513}}, "metadata"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param
    assert not isinstance(caught.value, UnsupportedParameter)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"background": True}, "background"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"conversation": {"id": "conv_1"}}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"moderation": {"model": "m"}}, "moderation"),
        ({"context_management": [{"type": "compaction"}]}, "context_management"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL, {"type": "file_search", "vector_store_ids": []}]}, "tools[1].type"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "mcp", "server_label": "x"}}, "tool_choice.type"),
        (
            {"tool_choice": {"type": "allowed_tools", "tools": [{"type": "image_generation"}]}, "tools": [TOOL]},
            "tool_choice.tools[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0]"),
        ({"input": [{"type": "computer_call_output", "call_id": "c"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_json", "data": {}}]}]}, "input[0].content[0].type"),
        ({"input": [CALL, OUTPUT | {"output": [{"type": "input_image"}]}]}, "input[1].output[0].type"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        read(**fields)
    assert caught.value.param == param


def test_a_hosted_tool_is_named() -> None:
    with pytest.raises(UnsupportedParameter, match="'web_search_preview'"):
        read(tools=[{"type": "web_search_preview"}])


NULLABLE = [field.name for field in msgspec.structs.fields(type(read().body)) if field.default is None]


def test_nulls_are_absent() -> None:
    assert len(NULLABLE) > 25
    assert read(**dict.fromkeys(NULLABLE)).tasks == read().tasks == (Generate(messages=task().messages),)


def test_harmless_fields_are_accepted() -> None:
    found = read(
        store=True,
        user="u",
        metadata={"a": "b"},
        service_tier="auto",
        truncation="disabled",
        background=False,
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        stream_options={"include_obfuscation": False},
        prompt_cache_key="k",
        max_tool_calls=3,
        tools=[],
    )
    assert found.tasks == read().tasks
    assert found.ignored == ("reasoning",)  # OpenAI's models would think as much as it says


def test_unknown_fields_are_ignored_by_name() -> None:
    assert read(seed=1, frequency_penalty=2).ignored == ("seed", "frequency_penalty")


def test_msgpack_is_read_too() -> None:
    packed = msgspec.msgpack.encode({"model": "m", "input": "Hi", "tools": [TOOL]})
    assert decode(packed, "msgpack").tasks == read(tools=[TOOL]).tasks


@pytest.mark.parametrize(
    ("items", "expected"),
    [
        ("Hi", [said("user", "Hi")]),
        ([{"role": "user", "content": "Hi"}], [said("user", "Hi")]),
        ([{"role": "developer", "content": "Hi", "type": "message"}], [said("developer", "Hi")]),
        ([{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], [said("user", "Hi")]),
        (
            [{"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}],
            [said("user", [{"text": "a", "type": "text"}, {"text": "b", "type": "text"}])],
        ),
        (
            [
                {
                    "id": "rs_1",
                    "type": "reasoning",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": "?"}],
                },
                {
                    "id": "msg_1",
                    "type": "message",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Ho", "annotations": [], "logprobs": []}],
                },
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "No"}]},
            ],
            [said("assistant", "Ho"), said("assistant", "No")],
        ),
        (
            [CALL, CALL | {"call_id": "c2"}, OUTPUT, OUTPUT | {"call_id": "c2"}],
            [
                said("assistant", None) | {"tool_calls": called("c1", "c2")},
                said("tool", "rain") | {"tool_call_id": "c1"},
                said("tool", "rain") | {"tool_call_id": "c2"},
            ],
        ),
        (
            [CALL, OUTPUT, CALL | {"call_id": "c2"}, OUTPUT | {"call_id": "c2"}],
            [
                said("assistant", None) | {"tool_calls": called("c1")},
                said("tool", "rain") | {"tool_call_id": "c1"},
                said("assistant", None) | {"tool_calls": called("c2")},
                said("tool", "rain") | {"tool_call_id": "c2"},
            ],
        ),
        (
            [{"role": "assistant", "content": "Let me see."}, {"type": "reasoning", "summary": []}, CALL],
            [said("assistant", "Let me see.") | {"tool_calls": called("c1")}],
        ),
        (
            [CALL, {"role": "assistant", "content": "One moment."}, OUTPUT],
            [
                said("assistant", "One moment.") | {"tool_calls": called("c1")},
                said("tool", "rain") | {"tool_call_id": "c1"},
            ],
        ),
        (
            [CALL, OUTPUT | {"output": [{"type": "input_text", "text": "sun"}]}],
            [
                said("assistant", None) | {"tool_calls": called("c1")},
                said("tool", "sun") | {"tool_call_id": "c1"},
            ],
        ),
    ],
)
def test_an_input_becomes_a_chat(items: object, expected: list[dict[str, object]]) -> None:
    assert messages(items) == expected


def test_a_call_may_have_no_arguments() -> None:
    (message,) = messages([CALL | {"arguments": ""}])
    assert message["tool_calls"][0]["function"] == {"name": "weather", "arguments": ""}


def test_instructions_come_first() -> None:
    assert messages("Hi", instructions="Be brief.") == [said("system", "Be brief."), said("user", "Hi")]


def test_ten_thousand_calls_of_one_turn_are_one_message() -> None:
    found = messages([CALL | {"call_id": str(n)} for n in range(5000)] + [OUTPUT | {"call_id": "4999"}])
    assert [len(message.get("tool_calls", ())) for message in found] == [5000, 0]


def test_settings_reach_the_model() -> None:
    found = task(
        max_output_tokens=9,
        temperature=0,
        top_p=0.5,
        top_logprobs=2,
        include=["message.output_text.logprobs"],
        parallel_tool_calls=False,
        stream=True,
        tools=[TOOL, OTHER],
        text={"format": {"type": "json_schema", "name": "place", "schema": SCHEMA, "strict": True}},
    )
    assert found.tokens_max == 9
    assert found.sampling == Sampling(temperature=0, top_p=0.5)
    assert found.top_logprobs == 2
    assert not found.has_parallel_calls
    assert found.is_streamed
    assert (found.form, json.loads(found.pattern)) == ("json_schema", SCHEMA)
    assert json.loads(found.tools) == [
        {"type": "function", "function": {name: TOOL[name] for name in TOOL if name != "type"}},
        {"type": "function", "function": {"name": "time"}},
    ]


@pytest.mark.parametrize(
    ("choice", "names", "mode", "name"),
    [
        (None, ["weather", "time"], "auto", ""),
        ("auto", ["weather", "time"], "auto", ""),
        ("none", ["weather", "time"], "none", ""),
        ("required", ["weather", "time"], "required", ""),
        ({"type": "function", "name": "time"}, ["weather", "time"], "required", "time"),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "time"}]},
            ["time"],
            "required",
            "",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]},
            ["weather"],
            "auto",
            "",
        ),
    ],
)
def test_the_choice_of_tools(choice: object, names: list[str], mode: str, name: str) -> None:
    found = task(tools=[TOOL, OTHER], tool_choice=choice)
    assert [tool["function"]["name"] for tool in json.loads(found.tools)] == names
    assert (found.tool_choice, found.tool_name) == (mode, name)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"top_logprobs": 0}, None),
        ({"top_logprobs": 3}, 3),
    ],
)
def test_logprobs_are_asked_for_by_either_field(fields: dict[str, object], expected: int | None) -> None:
    assert task(**fields).top_logprobs == expected


# What the model did: its deltas, and how it ended.
Story = tuple[Sequence[Delta], Done]

SAID: Story = ([Delta("Hel", logprobs=HELLO[:1]), Delta("lo", logprobs=HELLO[1:])], Done(USAGE))
NOTHING: Story = ([], Done(USAGE))
CUT: Story = ([Delta("Hel")], Done(USAGE, finish="length"))
THOUGHT: Story = ([Delta(reasoning="Hm"), Delta(reasoning="m."), Delta("Yes.")], Done(USAGE))
CUT_IN_THOUGHT: Story = ([Delta(reasoning="Hmm")], Done(USAGE, finish="length"))
CALLED: Story = (
    [
        Delta("I will look. "),
        Delta(calls=(CallPart(0, "weather"), CallPart(0, "", '{"city":'))),
        Delta(calls=(CallPart(0, "", '"Bonn"}'), CallPart(1, "time", "{}"))),
    ],
    Done(USAGE, finish="tool_calls"),
)
CUT_IN_CALL: Story = ([Delta(calls=(CallPart(0, "weather", '{"ci'),))], Done(USAGE, finish="length"))
STORIES = [SAID, NOTHING, CUT, THOUGHT, CUT_IN_THOUGHT, CALLED, CUT_IN_CALL]


def gathered(story: Story) -> Generated:
    gathering = Gathering()
    for delta in story[0]:
        gathering.add(delta)
    return gathering.whole(story[1])


def stream_of(call: ResponsesCall, story: Story, error: ApplianceError | None = None) -> bytes:
    """The bytes of a stream, which an error may end in place of the end."""
    writer = call.writer(model="m", created_s=123)
    told = [writer.start(), *(writer.delta(0, delta) for delta in story[0])]
    told += [writer.error(error)] if error is not None else [writer.finish(0, story[1]), writer.end()]
    return b"".join(told)


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


def answered(story: Story, **fields: object) -> Response:
    """The answer as OpenAI's client reads it."""
    answer = read(**fields).answer([gathered(story)], model="m", created_s=123)
    with client_for(formats.encode(answer, "json"), "application/json") as client:
        return client.responses.create(model="m", input="Hi")


def streamed(story: Story, error: ApplianceError | None = None, **fields: object) -> list[Any]:
    """The events as OpenAI's client reads them."""
    content = stream_of(read(stream=True, **fields), story, error)
    with client_for(content, "text/event-stream") as client:
        return list(client.responses.create(model="m", input="Hi", stream=True))


RICH: dict[str, Any] = {
    "instructions": "Be brief.",
    "max_output_tokens": 99,
    "temperature": 0.5,
    "top_p": 0.25,
    "top_logprobs": 2,
    "parallel_tool_calls": False,
    "tools": [TOOL, OTHER],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "time"}]},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}, "verbosity": "low"},
    "metadata": {"a": "b"},
    "reasoning": {"effort": "low", "summary": "auto"},
    "user": "u",
    "store": True,
}


def test_an_answer() -> None:
    found = answered(SAID)
    (message,) = found.output
    assert isinstance(message, ResponseOutputMessage)
    assert found.id.startswith("resp_")
    assert message.id.startswith("msg_")
    assert (found.object, found.status, found.created_at, found.model) == ("response", "completed", 123, "m")
    assert found.output_text == "Hello"
    assert message.status == "completed"
    assert found.usage is not None
    assert found.usage.to_dict() == {
        "input_tokens": 7,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 5,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 12,
    }


def test_the_settings_are_echoed() -> None:
    found = answered(SAID, **RICH).to_dict()
    for name in ("instructions", "max_output_tokens", "temperature", "top_p", "top_logprobs", "parallel_tool_calls"):
        assert found[name] == RICH[name], name
    for name in ("tool_choice", "metadata", "reasoning", "user"):
        assert found[name] == RICH[name], name
    assert found["tools"] == [TOOL, OTHER | {"description": None, "parameters": None, "strict": None}]
    assert found["text"] == {
        "format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "description": None, "strict": None},
        "verbosity": "low",
    }
    assert found["store"] is False


def test_log_probabilities() -> None:
    (message,) = answered(SAID).output
    assert isinstance(message, ResponseOutputMessage)
    assert message.to_dict()["content"] == [
        {
            "type": "output_text",
            "text": "Hello",
            "annotations": [],
            "logprobs": [
                {
                    "token": "Hel",
                    "logprob": -0.25,
                    "bytes": list(b"Hel"),
                    "top_logprobs": [
                        {"token": "Hel", "logprob": -0.25, "bytes": list(b"Hel")},
                        {"token": "�", "logprob": -2.0, "bytes": [0xF0, 0x9F]},
                    ],
                },
                {
                    "token": "lo",
                    "logprob": -0.5,
                    "bytes": list(b"lo"),
                    "top_logprobs": [{"token": "lo", "logprob": -0.5, "bytes": list(b"lo")}],
                },
            ],
        }
    ]


def test_functions_are_called() -> None:
    found = answered(CALLED)
    message, first, second = found.output
    assert isinstance(message, ResponseOutputMessage)
    assert isinstance(first, ResponseFunctionToolCall)
    assert isinstance(second, ResponseFunctionToolCall)
    assert found.status == "completed"
    assert found.output_text == "I will look. "
    assert (first.name, first.arguments, first.status) == ("weather", '{"city":"Bonn"}', "completed")
    assert (second.name, second.arguments) == ("time", "{}")
    assert first.call_id.startswith("call_")
    assert first.call_id != second.call_id
    assert str(first.id).startswith("fc_")


def test_reasoning_is_an_item_of_its_own() -> None:
    thought, message = answered(THOUGHT).output
    assert isinstance(thought, ResponseReasoningItem)
    assert isinstance(message, ResponseOutputMessage)
    assert [part.text for part in thought.content or ()] == ["Hmm."]
    assert thought.summary == []


@pytest.mark.parametrize(
    ("story", "kinds"),
    [
        (CUT, [("message", "incomplete")]),
        (CUT_IN_THOUGHT, [("reasoning", "incomplete")]),
        (CUT_IN_CALL, [("function_call", "incomplete")]),
        (([], Done(finish="length")), [("message", "incomplete")]),
    ],
)
def test_a_limit_makes_the_last_item_incomplete(story: Story, kinds: list[tuple[str, str]]) -> None:
    for found in (answered(story), streamed(story)[-1].response):
        assert found.status == "incomplete"
        assert found.incomplete_details is not None
        assert found.incomplete_details.reason == "max_output_tokens"
        assert [(item.type, getattr(item, "status", None)) for item in found.output] == kinds


def test_an_answer_without_text_has_an_empty_message() -> None:
    for found in (answered(NOTHING), streamed(NOTHING)[-1].response):
        (message,) = found.output
        assert isinstance(message, ResponseOutputMessage)
        assert [part.to_dict()["text"] for part in message.content] == [""]


def test_an_answer_is_the_same_in_both_forms() -> None:
    answer = read(**RICH).answer([gathered(CALLED)], model="m", created_s=123)
    packed, written = formats.encode(answer, "msgpack"), formats.encode(answer, "json")
    assert msgspec.msgpack.decode(packed) == json.loads(written)


def test_the_events_of_a_text() -> None:
    events = streamed(SAID)
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []
    assert events[2].item.content == []
    assert [event.delta for event in events if event.type.endswith("delta")] == ["Hel", "lo"]
    assert [token.token for token in events[5].logprobs] == ["lo"]
    assert len(events[6].logprobs) == 2
    assert {event.item_id for event in events[3:8]} == {events[2].item.id}
    assert events[-1].response.usage.total_tokens == 12


def test_the_events_of_calls() -> None:
    events = streamed(CALLED)
    assert [(event.type.removeprefix("response."), event.output_index) for event in events[2:-1]] == [
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("output_text.delta", 0),
        ("output_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("function_call_arguments.delta", 1),
        ("function_call_arguments.delta", 1),
        ("function_call_arguments.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
    ]
    added = events[8].item
    assert (added.name, added.arguments, added.status) == ("weather", "", "in_progress")
    assert events[11].arguments == '{"city":"Bonn"}'
    assert events[12].item.call_id == added.call_id


def test_the_events_of_reasoning() -> None:
    events = streamed(THOUGHT)
    assert [(event.type.removeprefix("response."), event.output_index) for event in events[2:10]] == [
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
    ]
    assert events[6].text == "Hmm."


def test_text_after_calls_is_a_message_of_its_own() -> None:
    parts = [Delta("a"), Delta(calls=(CallPart(0, "time", "{}"),)), Delta("b"), Delta(calls=(CallPart(1, "time"),))]
    events = streamed((parts, Done(finish="tool_calls")))
    done = events[-1].response.output
    assert [item.type for item in done] == ["message", "function_call", "message", "function_call"]
    assert [event.output_index for event in events if event.type == "response.output_item.done"] == [0, 1, 2, 3]
    assert events[-1].response.output_text == "ab"


def test_tokens_of_text_that_is_held_back_come_with_the_next_text() -> None:
    parts = [Delta("", logprobs=HELLO[:1]), Delta("Hello", logprobs=HELLO[1:])]
    events = streamed((parts, Done()))
    (delta,) = [event for event in events if event.type == "response.output_text.delta"]
    assert [token.token for token in delta.logprobs] == ["Hel", "lo"]


@pytest.mark.parametrize("story", STORIES)
def test_a_stream_ends_with_the_answer(story: Story) -> None:
    """But for ids, which are made at random."""

    def shown(response: Response) -> object:
        found: dict[str, Any] = response.to_dict()
        for holder in (found, *found["output"]):
            for name in ("id", "call_id"):
                holder.pop(name, None)
        return found

    assert shown(streamed(story, None, **RICH)[-1].response) == shown(answered(story, **RICH))


@pytest.mark.parametrize("story", [SAID, NOTHING, THOUGHT, CALLED])
def test_the_stream_helper_puts_it_together(story: Story) -> None:
    content = stream_of(read(stream=True), story)
    with client_for(content, "text/event-stream") as client, client.responses.stream(model="m", input="Hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert final.output_text == "".join(deltas) == gathered(story).text
    calls = [Call(item.name, item.arguments) for item in final.output if item.type == "function_call"]
    assert tuple(calls) == gathered(story).calls


class Place(BaseModel):
    """What `parse` reads."""

    city: str


def test_the_stream_helper_parses_what_it_asked_for() -> None:
    content = stream_of(read(stream=True), ([Delta('{"city":'), Delta(' "Bonn"}')], Done()))
    with (
        client_for(content, "text/event-stream") as client,
        client.responses.stream(model="m", input="Hi", text_format=Place) as stream,
    ):
        assert stream.get_final_response().output_parsed == Place(city="Bonn")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (EngineFailed("the engine died"), "server_error"),
        (Overloaded("full"), "server_error"),
        (TooLong("too long", param="input"), "invalid_prompt"),
    ],
)
def test_a_failure_in_mid_stream_is_raised_by_the_client(error: ApplianceError, code: str) -> None:
    content = stream_of(read(stream=True), ([Delta("Hel")], Done()), error)
    with client_for(content, "text/event-stream") as client:
        events = client.responses.create(model="m", input="Hi", stream=True)
        with pytest.raises(openai.APIError, match=error.message) as caught:
            list(events)
    assert caught.value.code == error.code
    *_, told, failed = [json.loads(line[6:]) for line in content.split(b"\n") if line.startswith(b"data: ")]
    assert (told["type"], told["code"], told["message"], told["param"]) == (
        "error",
        error.code,
        error.message,
        error.param,
    )
    assert failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": code, "message": error.message}
    assert failed["response"]["output"][0]["content"][0]["text"] == "Hel"
    assert failed["sequence_number"] == told["sequence_number"] + 1


def test_each_event_has_its_type_twice_and_nothing_else() -> None:
    """An `id:` or an event without data breaks openai-python; a `[DONE]` is not of this endpoint."""
    content = stream_of(read(stream=True), CALLED)
    assert content.endswith(b"\n\n")
    for event in content.removesuffix(b"\n\n").split(b"\n\n"):
        kind, data = event.split(b"\n")
        assert kind.removeprefix(b"event: ").decode() == json.loads(data.removeprefix(b"data: "))["type"]


# Of all levels, so that chance finds its way into them.
WORDS = [
    *("type", "name", "role", "content", "text", "call_id", "arguments", "output", "format", "schema", "mode", "tools"),
    *("function", "message", "user", "assistant", "input_text", "allowed_tools", "json_schema", "function_call"),
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


def fault(fields: dict[str, object]) -> str | None:
    """The field that is refused; None if the body is read, and answered."""
    try:
        call = read(**fields)
    except InvalidRequest as error:
        return (error.param or "").split(".")[0].split("[")[0]
    formats.encode(call.answer([gathered(SAID)], model="m", created_s=1), "json")
    return None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*NULLABLE, "input"]), JSON, min_size=1, max_size=3))
def test_whatever_is_sent_is_read_or_refused_by_name(fields: dict[str, object]) -> None:
    """Never another exception, which would be a 500."""
    assert fault(fields) in {None, *fields}


def test_body_and_answer_have_a_schema() -> None:
    """As the OpenAPI document wants of them."""
    _, components = msgspec.json.schema_components([ResponsesBody, WholeResponse])
    assert {"ResponsesBody", "Response", "CallItem"} <= set(components)
