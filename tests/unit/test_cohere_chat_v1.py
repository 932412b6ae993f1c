"""Cohere's v1 chats: one message and its history to tasks, refusals by name, and texts to answers and lines."""

import json
import re
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from appliance.compat.cohere_chat_v1 import CohereChatV1Body, CohereChatV1Call, decode
from appliance.compat.generation import Call, Generated
from appliance.errors import EngineFailed, InvalidRequest, MalformedBody, UnsupportedParameter
from appliance.jobs import CallPart, Delta, Done, Sampling, Usage

Json = dict[str, Any]  # `Any`: JSON

USAGE = Usage(input_tokens=7, output_tokens=3)
TOKENS = {"input_tokens": 7, "output_tokens": 3}
META = {"api_version": {"version": "1"}, "billed_units": TOKENS, "tokens": TOKENS}
OSLO: Json = {"name": "weather", "parameters": {"city": "Oslo"}}
ROME: Json = {"name": "weather", "parameters": {"city": "Rome"}}
COLD: Json = {"call": OSLO, "outputs": [{"degrees": 2}]}
WARM: Json = {"call": ROME, "outputs": [{"degrees": 22}, {"é": None}]}
WEATHER: Json = {"name": "weather", "description": "Of a city"}


def call_of(message: str = "hi", **fields: Any) -> CohereChatV1Call:
    return decode(msgspec.json.encode({"message": message} | fields))


def messages_of(message: str = "hi", **fields: Any) -> Any:
    return json.loads(call_of(message, **fields).task.messages)


def asked(number: int, call: Json) -> Json:
    """A call as OpenAI's chats have it."""
    arguments = msgspec.json.encode(call["parameters"]).decode()
    return {"id": f"call_{number}", "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def told(number: int, result: Json) -> Json:
    """Its result."""
    outputs = msgspec.json.encode(result["outputs"]).decode()
    return {"role": "tool", "tool_call_id": f"call_{number}", "content": outputs}


def generated(text: str = "", **fields: Any) -> Generated:
    whole: Json = {"reasoning": "", "calls": (), "logprobs": (), "finish": "stop", "stop": "", "usage": USAGE}
    return Generated(text, **(whole | fields))


def answer_of(text: Generated, message: str = "hi", **fields: Any) -> Json:
    answer = call_of(message, **fields).answer([text], model="m", created_s=0)
    found: Json = json.loads(msgspec.json.encode(answer))
    assert len(found.pop("generation_id")) == len(found.pop("response_id")) == 36
    return found


def lines_of(deltas: Sequence[Delta], done: Done | EngineFailed, **fields: Any) -> list[Json]:
    """The events; ids are checked and taken out."""
    writer = call_of(stream=True, **fields).writer(model="m", created_s=0)
    data = writer.start() + b"".join(writer.delta(0, delta) for delta in deltas)
    data += writer.finish(0, done) + writer.end() if isinstance(done, Done) else writer.error(done)
    assert data.isascii()
    assert data.endswith(b"\n")
    found: list[Json] = [json.loads(line) for line in data.splitlines()]
    assert [event.pop("is_finished") for event in found] == [False] * (len(found) - 1) + [True]
    assert found[0].pop("generation_id") == found[-1]["response"].pop("generation_id")
    assert len(found[-1]["response"].pop("response_id")) == 36
    return found


def test_what_is_not_said_is_as_at_cohere() -> None:
    call = call_of()

    assert (call.model, call.is_streamed, call.ignored) == (None, False, ())
    (task,) = call.tasks
    assert json.loads(task.messages) == [{"role": "user", "content": "hi"}]
    assert task.sampling == Sampling(temperature=0.3, top_p=0.75)
    assert (task.form, task.tokens_max, task.stop, task.tools, task.tool_choice) == ("text", None, (), b"", "auto")


def test_explicit_nulls_mean_absent() -> None:
    names = [
        "model", "stream", "preamble", "chat_history", "documents", "tools", "tool_results", "force_single_step",
        "citation_quality", "connectors", "conversation_id", "max_input_tokens", "prompt_truncation", "raw_prompting",
        "search_queries_only", "max_tokens", "temperature", "k", "p", "seed", "stop_sequences", "frequency_penalty",
        "presence_penalty", "response_format", "safety_mode",
    ]  # fmt: skip
    nulls: Json = dict.fromkeys(names)
    assert call_of(**nulls) == call_of()


def test_every_setting_arrives() -> None:
    call = call_of(
        model="m",
        max_tokens=5,
        temperature=1,
        k=3,
        p=0.5,
        seed=7,
        stop_sequences=["###"],
        frequency_penalty=1,
        presence_penalty=0.5,
        stream=True,
        response_format={"type": "json_object", "schema": {"type": "object"}},
    )

    assert (call.model, call.is_streamed) == ("m", True)
    assert call.task.sampling == Sampling(
        temperature=1.0, top_p=0.5, top_k=3, frequency_penalty=1.0, presence_penalty=0.5, seed=7
    )
    assert (call.task.tokens_max, call.task.stop) == (5, ("###",))
    assert (call.task.form, call.task.pattern) == ("json_schema", b'{"type":"object"}')


def test_what_asks_for_nothing_else_is_taken() -> None:
    call = call_of(
        connectors=[],
        prompt_truncation="OFF",
        raw_prompting=False,
        search_queries_only=False,
        citation_quality="accurate",
        safety_mode="NONE",
        force_single_step=True,
        return_prompt=True,
    )

    assert call.task == call_of().task
    assert call.ignored == ("return_prompt", "citation_quality")  # nothing is cited


def test_a_history_comes_before_the_message() -> None:
    history = [
        {"role": "SYSTEM", "message": "Be brief."},
        {"role": "USER", "message": "hello"},
        {"role": "CHATBOT", "message": "good day", "tool_calls": []},
    ]

    assert messages_of(chat_history=history, preamble="Rhyme.") == [
        {"role": "system", "content": "Rhyme."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "good day"},
        {"role": "user", "content": "hi"},
    ]


def test_documents_come_as_the_systems_message() -> None:
    documents = [
        {"id": "d1", "title": "T", "text": "x", "url": "secret", "_excludes": ["url"]},
        {"text": "y", "pages": 2, "_excludes": [["text"], 2, None]},
    ]
    listed = "Use the following documents where they help to answer.\n\nDocument 1\ntitle: T\ntext: x\n\nDocument 2\n"

    assert messages_of(documents=documents)[0] == {"role": "system", "content": f"{listed}text: y\npages: 2"}
    merged = messages_of(documents=documents, preamble="Rhyme.")
    assert merged[0]["content"].startswith("Rhyme.\n\nUse the following")
    assert len(merged) == 2


@pytest.mark.parametrize(
    ("words", "schema"),
    [
        ("str", {"type": "string"}),
        ("int", {"type": "integer"}),
        ("float", {"type": "number"}),
        ("Bool", {"type": "boolean"}),
        ("number", {"type": "number"}),
        ("list", {"type": "array"}),
        ("List[str]", {"type": "array", "items": {"type": "string"}}),
        ("typing.List[Optional[int]]", {"type": "array", "items": {"type": "integer"}}),
        ("list[list[float]]", {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}),
        ("tuple[int, str]", {"type": "array"}),
        ("Dict[str, int]", {"type": "object"}),
        ("object", {"type": "object"}),
        ("Any", {}),
    ],
)
def test_parameters_become_schemas(words: str, schema: Json) -> None:
    definitions = {"x": {"type": words, "description": "what", "required": True}, "y": {"type": "str"}}
    (tool,) = json.loads(call_of(tools=[WEATHER | {"parameter_definitions": definitions}]).task.tools)

    assert tool == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Of a city",
            "parameters": {
                "type": "object",
                "properties": {"x": schema | {"description": "what"}, "y": {"type": "string"}},
                "required": ["x"],
                "additionalProperties": False,
            },
        },
    }


def test_results_bring_calls_along_that_no_history_has() -> None:
    """The way of a single step: the same message again, with results."""
    found = messages_of(tools=[WEATHER], tool_results=[COLD, WARM])

    assert found == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [asked(0, OSLO), asked(1, ROME)]},
        told(0, COLD),
        told(1, WARM),
    ]


def test_results_belong_to_the_calls_of_the_history() -> None:
    """The way of several steps: the history of the answer, and no message."""
    history = [
        {"role": "USER", "message": "hi"},
        {"role": "CHATBOT", "message": "I look.", "tool_calls": [OSLO, ROME]},
    ]
    before = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I look.", "tool_calls": [asked(0, OSLO), asked(1, ROME)]},
    ]

    swapped = messages_of("", chat_history=history, tool_results=[WARM, COLD])
    assert swapped == [*before, told(1, WARM), told(0, COLD)]
    asking_on = messages_of("and?", chat_history=history, tool_results=[COLD])
    assert asking_on == [*before, told(0, COLD), {"role": "user", "content": "and?"}]


def test_a_call_made_twice_has_two_results() -> None:
    history = [{"role": "CHATBOT", "message": "", "tool_calls": [OSLO, OSLO]}]

    found = messages_of("", chat_history=history, tool_results=[COLD, COLD])
    assert [message.get("tool_call_id") for message in found] == [None, "call_0", "call_1"]


def test_any_number_of_calls_gets_its_results() -> None:
    """Each is found at once: looking through all of them held up everybody else, for minutes."""
    calls = [{"name": "f", "parameters": {"number": number // 2}} for number in range(20_000)]
    history = [{"role": "CHATBOT", "message": "", "tool_calls": calls}]

    found = messages_of(
        "", chat_history=history, tool_results=[{"call": call, "outputs": []} for call in reversed(calls)]
    )

    ids = [message["tool_call_id"] for message in found[1:]]
    pairs = [(2 * number, 2 * number + 1) for number in reversed(range(10_000))]  # of calls that are the same
    assert ids == [f"call_{number}" for pair in pairs for number in pair]


def test_results_within_the_history_stay_there() -> None:
    history = [
        {"role": "USER", "message": "hi"},
        {"role": "CHATBOT", "message": "", "tool_calls": [OSLO]},
        {"role": "TOOL", "tool_results": [COLD]},
        {"role": "CHATBOT", "message": "", "tool_calls": [ROME]},
        {"role": "TOOL", "tool_results": [COLD]},
    ]

    assert messages_of("so?", chat_history=history) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [asked(0, OSLO)]},
        told(0, COLD),
        {"role": "assistant", "tool_calls": [asked(1, ROME)]},
        # Of no call that waits: it brings its own along.
        {"role": "assistant", "tool_calls": [asked(2, OSLO)]},
        told(2, COLD),
        {"role": "user", "content": "so?"},
    ]


@pytest.mark.parametrize(
    ("fields", "mode"),
    [
        ({}, "auto"),
        ({"force_single_step": True}, "auto"),
        ({"tool_results": [COLD]}, "auto"),
        ({"tool_results": [COLD], "force_single_step": True}, "none"),
    ],
)
def test_a_single_step_ends_with_its_results(fields: Json, mode: str) -> None:
    assert call_of(tools=[WEATHER], **fields).task.tool_choice == mode


DEEP: Any = {}
for _ in range(64):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"message": None}, "message"),
        ({"message": ""}, "message"),
        ({"chat_history": [{"role": "user", "message": "x"}]}, "chat_history[0].role"),
        ({"chat_history": [{"role": "USER"}]}, "chat_history[0].message"),
        ({"chat_history": [{"role": "CHATBOT", "tool_calls": []}]}, "chat_history[0].message"),
        ({"chat_history": [{"role": "TOOL", "message": "x"}]}, "chat_history[0].tool_results"),
        ({"chat_history": [{"role": "USER", "message": "x", "tool_calls": [OSLO]}]}, "chat_history[0].tool_calls"),
        (
            {"chat_history": [{"role": "CHATBOT", "tool_calls": [{"name": "f", "parameters": DEEP}]}]},
            "chat_history[0].tool_calls[0].parameters",
        ),
        (
            {"chat_history": [{"role": "TOOL", "tool_results": [{"call": OSLO, "outputs": [DEEP]}]}]},
            "chat_history[0].tool_results[0].outputs",
        ),
        ({"chat_history": [{"role": "USER", "message": "x"}] * 10_001}, "chat_history"),
        ({"tool_results": [{"call": OSLO}]}, "tool_results[0].outputs"),
        ({"tool_results": [{"call": OSLO, "outputs": ["x"]}]}, "tool_results[0].outputs[0]"),
        (
            {"tool_results": [{"call": {"name": "f", "parameters": DEEP}, "outputs": []}]},
            "tool_results[0].call.parameters",
        ),
        ({"tools": [{"name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
        (
            {"tools": [{"name": "f", "parameter_definitions": {"x": {"type": "datetime"}}}]},
            "tools[0].parameter_definitions.x.type",
        ),
        (
            {"tools": [{"name": "f", "parameter_definitions": {"x": {"type": "list[list[what]]"}}}]},
            "tools[0].parameter_definitions.x.type",
        ),
        (
            {"tools": [{"name": "f", "parameter_definitions": {"x": {"type": "list[" * 21}}}]},
            "tools[0].parameter_definitions.x.type",
        ),
        ({"documents": [{"text": DEEP}]}, "documents[0]"),
        ({"documents": [{"text": "x", "_excludes": "text"}]}, "documents[0]._excludes"),
        ({"documents": ["x"]}, "documents[0]"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop_sequences": ["a"] * 6}, "stop_sequences"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema"),
    ],
)
def test_what_is_wrong_is_refused_by_name(fields: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        call_of(**fields)

    assert caught.value.param == param
    assert param.rpartition(".")[2] in caught.value.message


@pytest.mark.parametrize(
    "fields",
    [
        {"connectors": [{"id": "web-search"}]},
        {"conversation_id": "c"},
        {"max_input_tokens": 100},
        {"prompt_truncation": "AUTO"},
        {"prompt_truncation": "AUTO_PRESERVE_ORDER"},
        {"prompt_truncation": "LATER"},
        {"raw_prompting": True},
        {"search_queries_only": True},
        {"safety_mode": "STRICT"},
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: Json) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        call_of(**fields)

    assert [caught.value.param] == list(fields)


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


@pytest.mark.parametrize("field", [field.name for field in msgspec.structs.fields(CohereChatV1Body)])
def test_a_chance_value_is_read_or_refused_by_name(field: str) -> None:
    for value in CHANCE:
        body = {"message": "hi"} | {field: value}
        assert fault_of(body) in (None, field), value


def test_a_body_that_is_no_object_is_refused() -> None:
    with pytest.raises(MalformedBody):
        decode(b'"hi"')


def test_a_whole_answer() -> None:
    history = [{"role": "USER", "message": "hello"}, {"role": "CHATBOT", "message": "good day"}]

    assert answer_of(generated("Grüße 🦀", reasoning="hm"), chat_history=history) == {
        "text": "Grüße 🦀",
        "finish_reason": "COMPLETE",
        "chat_history": [
            *history,
            {"role": "USER", "message": "hi"},
            {"role": "CHATBOT", "message": "Grüße 🦀"},
        ],
        "meta": META,
    }


@pytest.mark.parametrize(
    ("finish", "stop", "reason", "reason_of_event"),
    [
        ("stop", "", "COMPLETE", "COMPLETE"),
        ("stop", "###", "STOP_SEQUENCE", "COMPLETE"),
        ("length", "", "MAX_TOKENS", "MAX_TOKENS"),
        ("tool_calls", "", "COMPLETE", "COMPLETE"),
    ],
)
def test_why_it_ended(finish: Any, stop: str, reason: str, reason_of_event: str) -> None:
    assert answer_of(generated("x", finish=finish, stop=stop))["finish_reason"] == reason
    event = lines_of([], Done(USAGE, finish=finish, stop=stop))[-1]
    assert (event["finish_reason"], event["response"]["finish_reason"]) == (reason_of_event, reason)


def test_calls_come_as_objects_and_with_the_history() -> None:
    calls = (Call("weather", '{"city":"Oslo"}'), Call("time", ""))
    answer = answer_of(generated("I look.", calls=calls, finish="tool_calls"), tool_results=[COLD])

    found = [OSLO, {"name": "time", "parameters": {}}]
    assert (answer["text"], answer["tool_calls"]) == ("I look.", found)
    assert answer["chat_history"] == [
        {"role": "USER", "message": "hi"},
        {"role": "TOOL", "tool_results": [COLD]},
        {"role": "CHATBOT", "message": "I look.", "tool_calls": found},
    ]


def test_an_answers_history_can_be_sent_again() -> None:
    first = answer_of(generated(calls=(Call("weather", '{"city":"Oslo"}'),), finish="tool_calls"))
    second = answer_of(generated("Cold."), "", chat_history=first["chat_history"], tool_results=[COLD])

    assert messages_of("so?", chat_history=second["chat_history"]) == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "tool_calls": [asked(0, OSLO)]},
        told(0, COLD),
        {"role": "assistant", "content": "Cold."},
        {"role": "user", "content": "so?"},
    ]


def test_a_call_that_was_cut_is_left_out() -> None:
    calls = (Call("weather", '{"city":"Oslo"}'), Call("weather", '{"ci'))
    answer = answer_of(generated(calls=calls, finish="length"))

    assert (answer["tool_calls"], answer["finish_reason"]) == ([OSLO], "MAX_TOKENS")
    assert "tool_calls" not in answer_of(generated(calls=calls[1:], finish="length"))


@pytest.mark.parametrize("arguments", ["[1]", "Oslo", '{"a":'])
def test_arguments_that_are_no_object_are_no_answer(arguments: str) -> None:
    with pytest.raises(EngineFailed, match="weather"):
        answer_of(generated(calls=(Call("weather", arguments),), finish="tool_calls"))


def test_a_stream_of_text() -> None:
    lines = lines_of([Delta("Gr"), Delta(reasoning="hm"), Delta("üße\u2028\n🦀")], Done(USAGE))

    assert lines == [
        {"event_type": "stream-start"},
        {"event_type": "text-generation", "text": "Gr"},
        {"event_type": "text-generation", "text": "üße\u2028\n🦀"},
        {
            "event_type": "stream-end",
            "finish_reason": "COMPLETE",
            "response": answer_of(generated("Grüße\u2028\n🦀")),
        },
    ]


def test_a_stream_of_calls() -> None:
    deltas = [
        Delta("I look."),
        Delta(calls=(CallPart(0, "weather"), CallPart(0, arguments='{"city":'))),
        Delta(calls=(CallPart(0, arguments='"Oslo"}'), CallPart(1, "time", "{}"))),
    ]
    calls = [OSLO, {"name": "time", "parameters": {}}]

    lines = lines_of(deltas, Done(USAGE, finish="tool_calls"), tools=[WEATHER])
    assert lines[1:-1] == [
        {"event_type": "text-generation", "text": "I look."},
        {"event_type": "tool-calls-chunk", "tool_call_delta": {"index": 0, "name": "weather"}},
        {"event_type": "tool-calls-chunk", "tool_call_delta": {"index": 0, "parameters": '{"city":'}},
        {"event_type": "tool-calls-chunk", "tool_call_delta": {"index": 0, "parameters": '"Oslo"}'}},
        {"event_type": "tool-calls-chunk", "tool_call_delta": {"index": 1, "name": "time", "parameters": "{}"}},
        {"event_type": "tool-calls-generation", "text": "I look.", "tool_calls": calls},
    ]
    assert lines[-1]["response"]["tool_calls"] == calls


def test_a_stream_that_breaks_off_says_so_and_has_no_text() -> None:
    lines = lines_of([Delta("so fa")], EngineFailed("the engine died"))

    response = lines[-1].pop("response")
    assert lines[-1] == {"event_type": "stream-end", "finish_reason": "ERROR", "error": "the engine died"}
    assert (response["text"], response["finish_reason"]) == ("", "ERROR")
    assert response["chat_history"] == [{"role": "USER", "message": "hi"}]


def test_no_pings_stand_between_its_lines() -> None:
    writer = call_of(stream=True).writer(model="m", created_s=0)
    assert (writer.content_type, writer.takes_pings) == (b"application/stream+json", False)
