"""Cohere's v2 chats: bodies to tasks, refusals by name, and texts to answers and events."""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from appliance.compat.cohere_chat import CohereChatBody, CohereChatCall, decode
from appliance.compat.generation import Call, Gathering, Generated
from appliance.errors import EngineFailed, InvalidRequest, MalformedBody, UnsupportedParameter
from appliance.jobs import CallPart, Chosen, Delta, Done, Sampling, Usage

Json = dict[str, Any]  # `Any`: JSON

USER: Json = {"role": "user", "content": "hi"}
WEATHER: Json = {
    "type": "function",
    "function": {"name": "weather", "description": "Of a city", "parameters": {"type": "object"}},
}
CALL: Json = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
ASKED: Json = {"role": "assistant", "tool_calls": [CALL]}
USAGE = Usage(input_tokens=7, output_tokens=3, cached_tokens=2)
TOLD: Json = {
    "billed_units": {"input_tokens": 7, "output_tokens": 3},
    "tokens": {"input_tokens": 7, "output_tokens": 3},
    "cached_tokens": 2,
}


def call_of(**fields: Any) -> CohereChatCall:
    return decode(msgspec.json.encode({"model": "m", "messages": [USER]} | fields))


def messages_of(messages: Sequence[Json], **fields: Any) -> Any:
    return json.loads(call_of(messages=messages, **fields).task.messages)


def generated(text: str = "", **fields: Any) -> Generated:
    whole: Json = {"reasoning": "", "calls": (), "logprobs": (), "finish": "stop", "stop": "", "usage": USAGE}
    return Generated(text, **(whole | fields))


def answer_of(text: Generated, **fields: Any) -> Json:
    answer: Json = json.loads(msgspec.json.encode(call_of(**fields).answer([text], model="m", created_s=0)))
    assert len(answer.pop("id")) == 36
    return answer


def events_of(deltas: Sequence[Delta], done: Done | EngineFailed, **fields: Any) -> list[Json]:
    """The events, checked for their frame; ids are taken out."""
    writer = call_of(stream=True, **fields).writer(model="m", created_s=0)
    data = writer.start() + b"".join(writer.delta(0, delta) for delta in deltas)
    data += writer.finish(0, done) + writer.end() if isinstance(done, Done) else writer.error(done)
    assert data.isascii()
    if isinstance(done, Done):
        data, _, rest = data.partition(b"data: [DONE]\n\n")
        assert not rest
    found: list[Json] = []
    for event in data.decode().removesuffix("\n\n").split("\n\n"):
        name, line = event.split("\n")
        found.append(json.loads(line.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert len(found[0].pop("id")) == 36
    return found


def content(kind: str, index: int, *pieces: str) -> list[Json]:
    """The events of one block."""
    return [
        {"type": "content-start", "index": index, "delta": {"message": {"content": {"type": kind, kind: ""}}}},
        *({"type": "content-delta", "index": index, "delta": {"message": {"content": {kind: one}}}} for one in pieces),
        {"type": "content-end", "index": index},
    ]


def ended(reason: str) -> Json:
    return {"type": "message-end", "delta": {"finish_reason": reason, "usage": TOLD}}


START: Json = {"type": "message-start", "delta": {"message": {"role": "assistant"}}}


def test_what_is_not_said_is_as_at_cohere() -> None:
    call = call_of()

    assert (call.model, call.is_streamed, call.ignored) == ("m", False, ())
    (task,) = call.tasks
    assert task.sampling == Sampling(temperature=0.3, top_p=0.75)
    assert (task.form, task.tokens_max, task.stop, task.top_logprobs) == ("text", None, (), None)
    assert (task.tools, task.tool_choice) == (b"", "auto")


def test_explicit_nulls_mean_absent() -> None:
    fields = [field.name for field in msgspec.structs.fields(call_of().body)]
    nulls = {name: None for name in fields if name not in ("model", "messages")}

    assert call_of(**nulls).task == call_of().task


def test_every_setting_arrives() -> None:
    task = call_of(
        max_tokens=5,
        temperature=0,
        k=500,
        p=0.01,
        seed=-1,
        stop_sequences=["a", "b", "c", "d", "é"],
        frequency_penalty=1,
        presence_penalty=0.5,
        stream=True,
        logprobs=True,
    ).task

    assert task.sampling == Sampling(
        temperature=0.0, top_p=0.01, top_k=500, frequency_penalty=1.0, presence_penalty=0.5, seed=2**63 - 1
    )
    assert (task.tokens_max, task.stop) == (5, ("a", "b", "c", "d", "é"))
    assert (task.is_streamed, task.top_logprobs) == (True, 0)
    assert call_of(p=0).task.sampling.top_p == call_of(p=1).task.sampling.top_p == 1.0


def test_fields_that_change_nothing_are_taken() -> None:
    call = call_of(
        citation_options={"mode": "fast"},
        priority=3,
        safety_mode="CONTEXTUAL",
        thinking={"type": "enabled"},
        response_format={"type": "text"},
        documents=[],
        tools=[],
        tool_choice="NONE",
        later_field=1,
    )

    assert call.task == call_of(tool_choice=None).task
    assert call.ignored == ("later_field", "citation_options")  # nothing is cited


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (USER, USER),
        ({"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be brief."}),
        (
            {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
            {"role": "user", "content": "one\ntwo"},
        ),
        ({"role": "assistant", "content": "so", "citations": [{}]}, {"role": "assistant", "content": "so"}),
        (
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "so"}]},
            {"role": "assistant", "content": "so"},
        ),
        (ASKED, ASKED),
        (ASKED | {"tool_plan": "I ask", "content": None}, ASKED | {"content": "I ask"}),
        (ASKED | {"tool_plan": "", "content": ""}, ASKED),
        (ASKED | {"tool_plan": "I ask", "content": "well"}, ASKED | {"content": "I ask\nwell"}),
    ],
)
def test_messages_become_openais(message: Json, expected: Json) -> None:
    assert messages_of([message]) == [expected]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("12 degrees", "12 degrees"),
        ([{"type": "text", "text": "12"}, {"type": "text", "text": "degrees"}], "12\ndegrees"),
        ([{"type": "document", "document": {"data": {"t": 12, "é": None}}}], '{"t":12,"é":null}'),
        ([{"type": "document", "document": {"id": "d", "data": '{"t": 12}'}}], '{"t": 12}'),
        ([{"type": "document", "document": {"data": {}}}, {"type": "text", "text": "x"}], "{}\nx"),
    ],
)
def test_results_of_tools_become_texts(said: Any, expected: str) -> None:
    found = messages_of([USER, ASKED, {"role": "tool", "tool_call_id": "c1", "content": said}])

    assert found[2] == {"role": "tool", "tool_call_id": "c1", "content": expected}


def test_documents_come_as_the_systems_message() -> None:
    documents = ["plain", {"id": "d1", "data": {"title": "T", "pages": 2}}, {"data": "text"}]
    listed = (
        "Use the following documents where they help to answer.\n\n"
        "Document 1\nplain\n\nDocument 2\ntitle: T\npages: 2\n\nDocument 3\ntext"
    )

    assert messages_of([USER], documents=documents) == [{"role": "system", "content": listed}, USER]
    system: Json = {"role": "system", "content": [{"type": "text", "text": "Be brief."}]}
    merged = {"role": "system", "content": f"Be brief.\n\n{listed}"}
    assert messages_of([system, USER], documents=documents) == [merged, USER]


@pytest.mark.parametrize(
    ("fields", "mode", "is_strict"),
    [
        ({}, "auto", None),
        ({"tool_choice": "REQUIRED"}, "required", None),
        ({"tool_choice": "NONE", "strict_tools": False}, "none", None),
        ({"strict_tools": True}, "auto", True),
    ],
)
def test_tools_are_offered(fields: Json, mode: str, is_strict: bool | None) -> None:
    task = call_of(tools=[WEATHER, {"function": {"name": "time"}}], **fields).task

    strict = {} if is_strict is None else {"strict": is_strict}
    assert json.loads(task.tools) == [
        {"type": "function", "function": WEATHER["function"] | strict},
        {"type": "function", "function": {"name": "time"} | strict},
    ]
    assert (task.tool_choice, task.has_parallel_calls) == (mode, True)


@pytest.mark.parametrize("name", ["schema", "json_schema"])
def test_the_form_of_an_answer(name: str) -> None:
    schema = {"type": "object", "properties": {"é": {"type": "integer"}}}
    task = call_of(response_format={"type": "json_object", name: schema}).task

    assert task.form == "json_schema"
    assert json.loads(task.pattern) == schema
    assert call_of(response_format={"type": "json_object"}).task.form == "json_object"
    both = {"type": "json_object", "schema": schema, "json_schema": schema}
    assert call_of(response_format=both).task == task


DEEP: Any = {}
for _ in range(64):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "developer", "content": "x"}]}, "messages[0].role"),
        ({"messages": [USER, {"content": "x"}]}, "messages[1].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": "[1]"}}]}
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [ASKED, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id"),
        ({"messages": [ASKED, {"role": "tool", "content": "x", "tool_call_id": "c2"}]}, "messages[1].tool_call_id"),
        ({"messages": [ASKED, {"role": "tool", "tool_call_id": "c1"}]}, "messages[1].content"),
        (
            {"messages": [ASKED, {"role": "tool", "tool_call_id": "c1", "content": [{"type": "document"}]}]},
            "messages[1].content[0].document",
        ),
        (
            {
                "messages": [
                    ASKED,
                    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "document", "document": {"id": "x"}}]},
                ]
            },
            "messages[1].content[0].document.data",
        ),
        ({"documents": [{"id": "x"}]}, "documents[0].data"),
        ({"documents": ["x", {"data": DEEP}]}, "documents[1].data"),
        ({"documents": ["x"] * 10_001}, "documents"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
        ({"tools": [{"function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "REQUIRED"}, "tool_choice"),
        ({"tool_choice": "auto", "tools": [WEATHER]}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"k": 501}, "k"),
        ({"p": 1.01}, "p"),
        ({"frequency_penalty": 1.5}, "frequency_penalty"),
        ({"presence_penalty": -1}, "presence_penalty"),
        ({"seed": 2**63}, "seed"),
        ({"stop_sequences": ["a"] * 6}, "stop_sequences"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
        ({"response_format": {"type": "text", "json_schema": {}}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_object", "schema": {}, "json_schema": {"type": "object"}}},
            "response_format.schema",
        ),
        ({"response_format": {"type": "json_object", "json_schema": DEEP}}, "response_format.json_schema"),
        ({"priority": -1}, "priority"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call_of(**fields)

    assert caught.value.param == param
    assert param.rpartition(".")[2] in caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "thinking"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "system", "content": [{"type": "document"}]}]}, "messages[0].content[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"safety_mode": "STRICT"}, "safety_mode"),
        ({"thinking": {"type": "enabled", "token_budget": 10}}, "thinking.token_budget"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: Json, param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        call_of(**fields)

    assert caught.value.param == param


# Whatever a field is, some of these are wrong for it.
CHANCE: list[Any] = [
    "word", "", True, -1, 0, 1, 10**9, 0.5, -0.5, 1e300, [], ["word"], [None], [[]], [{}], [{"type": 3}],
    [{"type": "function", "function": {}}], [{"role": "TOOL"}], [{"role": "tool", "content": None}],
    {}, {"type": "json_object"}, {"type": "text", "schema": []}, {"type": None}, DEEP, [DEEP], [DEEP, "word"],
]  # fmt: skip


def fault_of(body: Json) -> str | None:
    """The field that is refused; None for a body that is read."""
    try:
        task = decode(msgspec.json.encode(body)).task
    except InvalidRequest as refusal:
        return re.split(r"[\[.]", refusal.param or "")[0]
    json.loads(task.messages)
    return None


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(CohereChatBody)])
def test_a_chance_value_is_read_or_refused_by_name(field: str) -> None:
    for value in CHANCE:
        body = {"model": "m", "messages": [USER]} | {field: value}
        assert fault_of(body) in (None, field), value


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": "\xff"}'])
def test_a_body_that_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(MalformedBody):
        decode(body)


def test_a_whole_answer() -> None:
    assert answer_of(generated("Grüße 🦀")) == {
        "finish_reason": "COMPLETE",
        "message": {"role": "assistant", "content": [{"type": "text", "text": "Grüße 🦀"}]},
        "usage": TOLD,
    }


@pytest.mark.parametrize(
    ("finish", "stop", "reason"),
    [("stop", "", "COMPLETE"), ("stop", "###", "STOP_SEQUENCE"), ("length", "", "MAX_TOKENS")],
)
def test_why_it_ended(finish: str, stop: str, reason: str) -> None:
    assert answer_of(generated("x", finish=finish, stop=stop))["finish_reason"] == reason


def test_a_text_before_calls_is_their_plan() -> None:
    calls = (Call("weather", '{"city":"Oslo"}'), Call("time", "{}"))
    answer = answer_of(generated("I look.", calls=calls, finish="tool_calls"))

    assert answer["finish_reason"] == "TOOL_CALL"
    told = answer["message"]
    ids = [call.pop("id") for call in told["tool_calls"]]
    assert len(set(ids)) == 2
    assert told == {
        "role": "assistant",
        "tool_plan": "I look.",
        "tool_calls": [
            {"type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}},
            {"type": "function", "function": {"name": "time", "arguments": "{}"}},
        ],
    }
    assert set(answer_of(generated(calls=calls))["message"]) == {"role", "tool_calls"}


def test_thoughts_are_shown_unless_they_are_not_wanted() -> None:
    text = generated("so", reasoning="hm")

    thought = {"type": "thinking", "thinking": "hm"}
    said = {"type": "text", "text": "so"}
    assert answer_of(text)["message"]["content"] == [thought, said]
    assert answer_of(text, thinking={"type": "disabled"})["message"]["content"] == [said]


def test_an_answer_without_a_word_has_an_empty_text() -> None:
    assert answer_of(generated(finish="length"))["message"]["content"] == [{"type": "text", "text": ""}]


def test_log_probabilities_of_whole_characters() -> None:
    chosen = (
        Chosen(b"a", -0.5, id=3),
        Chosen(b"\xf0\x9f", -0.25, id=4),
        Chosen(b"\xa6\x80", -1.0, id=5),
        Chosen(b"\xe2\x82", -2.0, id=6),
    )

    assert answer_of(generated("a🦀", logprobs=chosen), logprobs=True)["logprobs"] == [
        {"text": "a", "token_ids": [3], "logprobs": [-0.5]},
        {"text": "🦀", "token_ids": [4, 5], "logprobs": [-0.25, -1.0]},
        {"text": "�", "token_ids": [6], "logprobs": [-2.0]},
    ]
    assert "logprobs" not in answer_of(generated("a"))


def test_a_stream_of_text() -> None:
    deltas = [Delta("Gr"), Delta("üße 🦀\u2028"), Delta()]

    assert events_of(deltas, Done(USAGE)) == [START, *content("text", 0, "Gr", "üße 🦀\u2028"), ended("COMPLETE")]


def test_no_line_of_a_stream_looks_like_its_end() -> None:
    """cohere-node ends a stream where a line has `[DONE]` in it."""
    writer = call_of(stream=True).writer(model="m", created_s=0)
    data = writer.start() + writer.delta(0, Delta("It ends with [DONE].")) + writer.finish(0, Done())

    assert b"[DONE]" not in data
    assert events_of([Delta("It ends with [DONE].")], Done(USAGE))[2]["delta"]["message"]["content"] == {
        "text": "It ends with [DONE]."
    }


def test_a_stream_of_thoughts_text_and_calls() -> None:
    deltas = [
        Delta(reasoning="h"),
        Delta(reasoning="m"),
        Delta("I look."),
        Delta(calls=(CallPart(0, "weather"),)),
        Delta(calls=(CallPart(0, arguments='{"city":'), CallPart(0, arguments='"Oslo"}'))),
        Delta(calls=(CallPart(1, "time"),)),
    ]
    events = events_of(deltas, Done(USAGE, finish="tool_calls"))

    ids = [event["delta"]["message"]["tool_calls"].pop("id") for event in events if event["type"] == "tool-call-start"]
    assert len(set(ids)) == 2

    def begun(name: str) -> Json:
        return {"message": {"tool_calls": {"type": "function", "function": {"name": name, "arguments": ""}}}}

    def more(arguments: str) -> Json:
        return {"message": {"tool_calls": {"function": {"arguments": arguments}}}}

    assert events == [
        START,
        *content("thinking", 0, "h", "m"),
        *content("text", 1, "I look."),
        {"type": "tool-call-start", "index": 0, "delta": begun("weather")},
        {"type": "tool-call-delta", "index": 0, "delta": more('{"city":')},
        {"type": "tool-call-delta", "index": 0, "delta": more('"Oslo"}')},
        {"type": "tool-call-end", "index": 0},
        {"type": "tool-call-start", "index": 1, "delta": begun("time")},
        {"type": "tool-call-end", "index": 1},
        ended("TOOL_CALL"),
    ]


@pytest.mark.parametrize(
    ("arguments", "done", "last"),
    [
        ('{"city":', Done(USAGE, finish="length"), "tool-call-delta"),
        ('{"city":', Done(USAGE, finish="stop", stop="Oslo"), "tool-call-delta"),
        ('{"city":"Oslo"}', Done(USAGE, finish="length"), "tool-call-end"),
    ],
)
def test_a_call_that_was_cut_does_not_end(arguments: str, done: Done, last: str) -> None:
    """The AI SDK reads a call's arguments at its end."""
    events = events_of([Delta(calls=(CallPart(0, "weather", arguments),))], done)

    assert [event["type"] for event in events[-2:]] == [last, "message-end"]


def test_text_before_a_call_that_was_asked_for_is_a_plan() -> None:
    plan = {"type": "tool-plan-delta", "delta": {"message": {"tool_plan": "I look."}}}
    fields: Json = {"tools": [WEATHER], "tool_choice": "REQUIRED"}

    assert events_of([Delta("I look.")], Done(USAGE, finish="length"), **fields) == [START, plan, ended("MAX_TOKENS")]
    assert answer_of(generated("I look.", finish="length"), **fields)["message"] == {
        "role": "assistant",
        "tool_plan": "I look.",
    }


def test_thoughts_that_are_not_wanted_are_not_streamed() -> None:
    deltas = [Delta(reasoning="hm"), Delta("so")]

    events = events_of(deltas, Done(USAGE), thinking={"type": "disabled"})
    assert events == [START, *content("text", 0, "so"), ended("COMPLETE")]


@pytest.mark.parametrize("deltas", [[], [Delta()], [Delta(""), Delta("")]])
def test_a_stream_without_a_word_has_an_empty_text(deltas: list[Delta]) -> None:
    assert events_of(deltas, Done(USAGE)) == [START, *content("text", 0), ended("COMPLETE")]


def test_streamed_log_probabilities_come_with_their_text() -> None:
    deltas = [
        Delta("a", logprobs=(Chosen(b"a", -0.5, id=3),)),
        Delta("🦀", logprobs=(Chosen(b"\xf0\x9f", -0.25, id=4), Chosen(b"\xa6\x80", -1.0, id=5))),
    ]
    events = events_of(deltas, Done(USAGE, stop="###"), logprobs=True)

    found = [(event["delta"]["message"]["content"]["text"], event["logprobs"]) for event in events[2:-2]]
    assert found == [
        ("a", {"text": "a", "token_ids": [3], "logprobs": [-0.5]}),
        ("🦀", {"text": "🦀", "token_ids": [4, 5], "logprobs": [-0.25, -1.0]}),
    ]
    assert events[-1] == ended("STOP_SEQUENCE")


def test_log_probabilities_of_a_text_do_not_go_with_the_thought_before_it() -> None:
    deltas = [Delta(reasoning="hm"), Delta("so", logprobs=(Chosen(b"so", -0.5, id=3),))]

    events = events_of(deltas, Done(USAGE), logprobs=True)
    told = [event.pop("logprobs", {}).get("text") for event in events if event["type"] == "content-delta"]
    assert told == [None, "so"]
    assert events == [START, *content("thinking", 0, "hm"), *content("text", 1, "so"), ended("COMPLETE")]


def test_a_stream_that_breaks_off_says_so_and_has_neither_usage_nor_end() -> None:
    events = events_of([Delta("so fa")], EngineFailed("the engine died"))

    assert len(events[-1].pop("id")) == 36
    assert events == [
        START,
        *content("text", 0, "so fa")[:-1],
        {"type": "message-end", "delta": {"finish_reason": "ERROR", "error": "the engine died"}},
    ]


def test_a_stream_says_what_a_whole_answer_does() -> None:
    deltas = [Delta("Grü"), Delta("ße"), Delta(" [DONE] 🦀")]
    done = Done(USAGE, finish="length")
    gathering = Gathering()
    for delta in deltas:
        gathering.add(delta)

    events = events_of(deltas, done)
    pieces = [event["delta"]["message"]["content"]["text"] for event in events if event["type"] == "content-delta"]
    answer = answer_of(gathering.whole(done))
    assert "".join(pieces) == answer["message"]["content"][0]["text"]
    assert events[-1]["delta"] == {"finish_reason": answer["finish_reason"], "usage": answer["usage"]}


def test_no_pings_stand_between_its_events() -> None:
    writer = call_of(stream=True).writer(model="m", created_s=0)
    assert (writer.content_type, writer.takes_pings) == (b"text/event-stream", False)
