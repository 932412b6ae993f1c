"""Messages and functions of a chat in OpenAI's shape: what is refused, by which name, and what a model is offered."""

import json
from typing import Any

import msgspec
import pytest

from appliance.compat import chat_messages, chat_tools
from appliance.compat.bodies import decoded_part
from appliance.compat.chat_messages import MESSAGES_MAX, Message, check
from appliance.compat.chat_tools import Choice, Function, NamedFunction, Offer, Tool
from appliance.compat.responses_settings import SCHEMA_LEVELS_MAX, SCHEMA_VALUES_MAX, TOOLS_MAX
from appliance.errors import ApplianceError, InvalidRequest, MalformedBody, UnsupportedParameter

Json = dict[str, Any]  # `Any`: JSON

HI: Json = {"role": "user", "content": "Hi"}
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Bonn"}'}}
CALLED: Json = {"role": "assistant", "content": None, "tool_calls": [CALL]}
RESULT: Json = {"role": "tool", "tool_call_id": "c1", "content": "rain"}
TEXT: Json = {"type": "text", "text": "Hi"}
IMAGE: Json = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
AUDIO: Json = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
FILE: Json = {"type": "file", "file": {"file_id": "f1"}}
DECODER = msgspec.json.Decoder(list[Message])


def said(role: str, content: object, **fields: object) -> Json:
    return {"role": role, "content": content} | fields


def read(messages: object) -> None:
    """Raises as a body with these messages would be refused."""
    found = decoded_part(msgspec.Raw(json.dumps(messages).encode()), DECODER, "messages")
    check(found)


@pytest.mark.parametrize(
    "messages",
    [
        [HI],
        [said("user", "")],
        [said("system", "Be brief."), said("developer", "Very."), HI, said("assistant", "Yes?"), HI],
        [said("user", [TEXT, TEXT])],
        [said("user", [{"type": "input_text", "text": "Hi"}])],
        [HI, said("assistant", [{"type": "refusal", "refusal": "No."}, TEXT]), HI],
        [HI, said("assistant", None, refusal="No."), HI],
        [HI, said("assistant", ""), HI],
        [HI, CALLED, RESULT],
        [HI, {"role": "assistant", "tool_calls": [CALL]}, RESULT],
        [
            HI,
            said("assistant", "I look.", tool_calls=[CALL, CALL | {"id": "c2"}]),
            RESULT | {"tool_call_id": "c2"},
            RESULT,
        ],
        [HI, CALLED, RESULT | {"content": [TEXT]}, said("assistant", "It rains."), RESULT],
        [HI, {"role": "assistant", "function_call": CALL["function"]}, said("function", "rain", name="weather")],
        [said("user", "Hi", name="Ada", tool_calls=None, function_call=None, tool_call_id=None, refusal=None)],
        [HI | {"cache_control": {"type": "ephemeral"}, "annotations": [], "audio": None}],
        [HI] * MESSAGES_MAX,
    ],
)
def test_messages_that_pass(messages: list[Json]) -> None:
    read(messages)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([HI] * (MESSAGES_MAX + 1), "messages"),
        (None, "messages"),
        ("Hi", "messages"),
        ({"role": "user"}, "messages"),
        (["Hi"], "messages[0]"),
        ([HI, None], "messages[1]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([said("robot", "Hi")], "messages[0].role"),
        ([HI | {"role": None}], "messages[0].role"),
        ([HI, {"role": "user"}], "messages[1].content"),
        ([said("user", None)], "messages[0].content"),
        ([said("user", 5)], "messages[0].content"),
        ([said("user", [])], "messages[0].content"),
        ([said("user", ["Hi"])], "messages[0].content[0]"),
        ([said("user", [{"text": "Hi"}])], "messages[0].content[0].type"),
        ([said("user", [TEXT, {"type": "text"}])], "messages[0].content[1].text"),
        ([said("user", [{"type": "text", "text": 5}])], "messages[0].content[0].text"),
        ([said("user", "Hi", name=5)], "messages[0].name"),
        ([HI | {"tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([HI | {"function_call": CALL["function"]}], "messages[0].function_call"),
        ([said("assistant", None)], "messages[0].content"),
        ([said("assistant", None, tool_calls=[])], "messages[0].content"),
        ([said("assistant", None, tool_calls={})], "messages[0].tool_calls"),
        ([said("assistant", None, tool_calls=[{"type": "function"}])], "messages[0].tool_calls[0].id"),
        ([said("assistant", None, tool_calls=[CALL | {"function": {}}])], "messages[0].tool_calls[0].function.name"),
        ([HI, CALLED, said("tool", "rain")], "messages[2].tool_call_id"),
        ([HI, CALLED, RESULT | {"tool_call_id": "c2"}], "messages[2].tool_call_id"),
        ([HI, RESULT, CALLED], "messages[1].tool_call_id"),
        ([HI, CALLED, RESULT | {"content": None}], "messages[2].content"),
    ],
)
def test_messages_that_are_refused(messages: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(messages)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([said("user", [TEXT, IMAGE])], "messages[0].content[1]"),
        ([HI, said("user", [AUDIO])], "messages[1].content[0]"),
        ([said("user", [FILE])], "messages[0].content[0]"),
        ([said("user", [{"type": "refusal", "refusal": "No."}])], "messages[0].content[0]"),
        ([said("assistant", None, tool_calls=[{"id": "c1", "type": "custom"}])], "messages[0].tool_calls[0].type"),
        ([said("assistant", None, tool_calls=[{"id": "c1"}])], "messages[0].tool_calls[0].type"),
    ],
)
def test_what_a_model_of_texts_does_not_take(messages: list[Json], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        read(messages)
    assert caught.value.param == param


def test_what_a_client_sends_is_told_in_part_only() -> None:
    for messages in (
        [said("r" * 9999, "Hi")],
        [said("user", [{"type": "t" * 9999}])],
        [RESULT | {"tool_call_id": "i" * 9999}],
    ):
        with pytest.raises(ApplianceError) as caught:
            read(messages)
        assert len(caught.value.message) < 300


@pytest.mark.parametrize("raw", [b'[{"role":"user","content":"\xff"}]', b'[{"role":"user","content":"\\ud800"}]'])
def test_text_that_is_none_is_malformed(raw: bytes) -> None:
    with pytest.raises(MalformedBody):
        decoded_part(msgspec.Raw(raw), DECODER, "messages")


def test_the_roles_of_the_document_are_those_that_pass() -> None:
    for role in chat_messages.SCHEMA["items"]["properties"]["role"]["enum"]:  # type: ignore[index]  # a literal
        if role != "tool":
            read([said(role, "Hi")])


SCHEMA: Json = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER: Json = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
TIME: Json = {"type": "function", "function": {"name": "time"}}


def offered(tools: object, choice: object = None) -> Offer:
    """As a body's `tools` and `tool_choice` are."""
    wanted = choice if isinstance(choice, str | None) else msgspec.convert(choice, Choice)
    return chat_tools.offer(msgspec.convert(tools, list[Tool]), wanted)


def named(name: object) -> Json:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: str, *tools: object) -> Json:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(tools)}}


def deep(levels: int) -> Json:
    """So many objects, one in another."""
    found: Json = {}
    for _ in range(levels - 1):
        found = {"not": found}
    return found


@pytest.mark.parametrize(
    ("choice", "tools", "mode", "name"),
    [
        (None, [WEATHER, TIME], "auto", ""),
        ("auto", [WEATHER, TIME], "auto", ""),
        ("none", [WEATHER, TIME], "none", ""),
        ("required", [WEATHER, TIME], "required", ""),
        (named("time"), [WEATHER, TIME], "required", "time"),
        (allowed("auto", named("time")), [TIME], "auto", ""),
        (allowed("required", named("time"), named("weather"), named("time")), [WEATHER, TIME], "required", ""),
    ],
)
def test_what_is_offered(choice: object, tools: list[Json], mode: str, name: str) -> None:
    found = offered([WEATHER, TIME], choice)
    assert json.loads(found.tools) == tools
    assert (found.mode, found.name) == (mode, name)


def test_a_function_travels_as_it_is() -> None:
    whole = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    assert json.loads(offered([whole]).tools) == [whole]


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_nothing_may_be_offered(choice: str | None) -> None:
    assert offered([], choice) == Offer()


@pytest.mark.parametrize("choice", ["required", named("time"), allowed("auto", named("time"))])
def test_a_choice_needs_tools(choice: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        offered([], choice)
    assert caught.value.param == "tool_choice"


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{"type": "function"}], "tools[0].function"),
        ([TIME, {"type": "function", "function": {}}], "tools[1].function.name"),
        ([named("")], "tools[0].function.name"),
        ([named("a b")], "tools[0].function.name"),
        ([named("n" * 65)], "tools[0].function.name"),
        ([named("naïve")], "tools[0].function.name"),
        ([named("time\n")], "tools[0].function.name"),
        ([TIME, WEATHER, TIME], "tools[2].function.name"),
        ([named(f"f{number}") for number in range(TOOLS_MAX + 1)], "tools"),
        (
            [{"type": "function", "function": {"name": "f", "parameters": deep(SCHEMA_LEVELS_MAX + 1)}}],
            "tools[0].function.parameters",
        ),
        (
            [{"type": "function", "function": {"name": "f", "parameters": {"enum": [1] * SCHEMA_VALUES_MAX}}}],
            "tools[0].function.parameters",
        ),
    ],
)
def test_tools_that_are_refused(tools: list[Json], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        offered(tools)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


def test_as_many_tools_as_the_limit_and_schemas_as_deep() -> None:
    names = ["n" * 64, "0", "-_-", *(f"f{number}" for number in range(TOOLS_MAX - 3))]
    schema = deep(SCHEMA_LEVELS_MAX)
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]
    assert json.loads(offered(tools).tools) == tools


@pytest.mark.parametrize("kind", ["custom", "web_search", "file_search", "mcp", "Function", ""])
def test_other_tools_are_not_served(kind: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        offered([TIME, {"type": kind}])
    assert caught.value.param == "tools[1].type"


@pytest.mark.parametrize(
    ("choice", "param", "kind"),
    [
        (named("other"), "tool_choice", InvalidRequest),
        (named(None), "tool_choice.function.name", InvalidRequest),
        ({"type": "function"}, "tool_choice.function.name", InvalidRequest),
        ({"type": "custom", "function": {"name": "time"}}, "tool_choice", UnsupportedParameter),
        ({"type": "allowed_tools"}, "tool_choice", UnsupportedParameter),
        (allowed("auto"), "tool_choice.allowed_tools.tools", InvalidRequest),
        (allowed("required", named("time"), named("other")), "tool_choice", InvalidRequest),
        (allowed("auto", {"type": "function"}), "tool_choice.allowed_tools.tools[0].function.name", InvalidRequest),
        (
            allowed("auto", named("time"), {"type": "custom", "function": {"name": "time"}}),
            "tool_choice.allowed_tools.tools[1].type",
            UnsupportedParameter,
        ),
    ],
)
def test_choices_that_are_refused(choice: object, param: str, kind: type[ApplianceError]) -> None:
    with pytest.raises(kind) as caught:
        offered([WEATHER, TIME], choice)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("choice", "mode", "name"),
    [(None, "auto", ""), ("auto", "auto", ""), ("none", "none", ""), (NamedFunction("time"), "required", "time")],
)
def test_functions_as_they_were_before_tools(choice: Any, mode: str, name: str) -> None:
    found = chat_tools.legacy([Function("time"), Function("weather", parameters=SCHEMA)], choice)
    assert json.loads(found.tools) == [
        TIME,
        {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    ]
    assert (found.mode, found.name) == (mode, name)


@pytest.mark.parametrize(
    ("functions", "choice", "param"),
    [
        ([Function()], None, "functions[0].name"),
        ([Function("time"), Function("a b")], None, "functions[1].name"),
        ([Function("time"), Function("time")], None, "functions[1].name"),
        ([Function("time", parameters=deep(SCHEMA_LEVELS_MAX + 1))], None, "functions[0].parameters"),
        ([Function(f"f{number}") for number in range(TOOLS_MAX + 1)], None, "functions"),
        ([Function("time")], NamedFunction("weather"), "function_call"),
        ([Function("time")], NamedFunction(), "function_call.name"),
    ],
)
def test_functions_are_refused_in_their_own_names(
    functions: list[Function], choice: NamedFunction | None, param: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_tools.legacy(functions, choice)
    assert caught.value.param == param
    assert f"'{param}" in caught.value.message
    assert "tool" not in caught.value.message
