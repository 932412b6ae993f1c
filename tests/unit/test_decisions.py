"""`POST /v1/decisions`: what is refused, what a question becomes, and answers as OpenAI's client reads them."""

import json
import math
from collections.abc import Sequence
from typing import Any

import httpx2
import msgspec
import numpy as np
import openai
import pytest
from openai.types.decision import (
    AnswerAnswerResourceChoice,
    AnswerAnswerResourcePredicate,
    AnswerAnswerResourceScore,
    Decision,
)

from appliance.compat import decisions, formats
from appliance.compat.decisions import CHOICES_MAX, LEVELS_MAX, QUESTIONS_MAX, DecisionsBody, DecisionsCall, decode
from appliance.compat.items import JSON_BYTES_MAX, JSON_LEVELS_MAX, JSON_VALUES_MAX
from appliance.errors import BadVector, InvalidRequest, MalformedBody, UnsupportedParameter
from appliance.jobs import Decide, Question, Usage

PREDICATE = {"type": "predicate", "name": "urgent", "instructions": "It is urgent."}
CHOICE = {
    "type": "choice",
    "name": "team",
    "instructions": "Who?",
    "choices": [{"value": "billing", "description": "Money."}, {"value": True}, {"value": "true"}],
}
SCORE = {
    "type": "score",
    "instructions": "How bad?",
    "levels": [{"label": "low"}, {"label": "mid", "description": "So so."}, {"label": "high"}],
}
CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"}


def body(**fields: object) -> bytes:
    """A valid body with these fields laid over it."""
    return json.dumps({"model": "m", "input": "Help!", "questions": [PREDICATE]} | fields).encode()


def read(**fields: object) -> DecisionsCall:
    return decode(body(**fields))


def asked(**fields: object) -> dict[str, Any]:
    return {"questions": [PREDICATE | fields]}


def chosen(*values: object) -> dict[str, Any]:
    return {"questions": [CHOICE | {"choices": [{"value": value} for value in values]}]}


def scored(*labels: object) -> dict[str, Any]:
    return {"questions": [SCORE | {"levels": [{"label": label} for label in labels]}]}


def told(*parts: object, role: str = "user") -> dict[str, Any]:
    return {"input": [{"role": role, "content": list(parts)}]}


def given(data: object) -> dict[str, Any]:
    return told({"type": "input_json", "data": data})


def nested(levels: int) -> dict[str, Any]:
    """So many objects, one in another."""
    found: dict[str, Any] = {}
    for _ in range(levels - 1):
        found = {"a": found}
    return found


@pytest.mark.parametrize("sent", [b"", b"[]", b"{", b'{"model":"m","input":"x","questions":NaN}'])
def test_what_is_no_json_object_is_malformed(sent: bytes) -> None:
    with pytest.raises(MalformedBody, match="the request body"):
        decode(sent)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"questions": None}, "questions"),
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * (QUESTIONS_MAX + 1)}, "questions"),
        ({"questions": [5]}, "questions[0]"),
        ({"questions": [{"instructions": "x"}]}, "questions[0].type"),
        (asked(type="essay"), "questions[0].type"),
        (asked(instructions=None), "questions[0].instructions"),
        (asked(instructions=" "), "questions[0].instructions"),
        (asked(instructions=[]), "questions[0].instructions"),
        (asked(instructions=[{"type": "input_text"}]), "questions[0].instructions[0].text"),
        (asked(instructions=[{"type": "input_json"}]), "questions[0].instructions[0].data"),
        (asked(name=5), "questions[0].name"),
        ({"questions": [PREDICATE, CHOICE | {"choices": None}]}, "questions[1].choices"),
        (chosen(), "questions[0].choices"),
        (chosen("a"), "questions[0].choices"),
        (chosen(*(str(n) for n in range(CHOICES_MAX + 1))), "questions[0].choices"),
        (chosen("a", "b", "a"), "questions[0].choices[2].value"),
        (chosen(True, "b", True), "questions[0].choices[2].value"),
        (chosen("a", 1), "questions[0].choices[1].value"),
        (chosen("a", ""), "questions[0].choices[1].value"),
        (chosen("a", None), "questions[0].choices[1].value"),
        (scored("a"), "questions[0].levels"),
        (scored(*(str(n) for n in range(LEVELS_MAX + 1))), "questions[0].levels"),
        (scored("a", " "), "questions[0].levels[1].label"),
        (scored("a", 5), "questions[0].levels[1].label"),
        (given([5]), "input[0].content[0].data[0]"),
        (given("text"), "input[0].content[0].data"),
        (given(None), "input[0].content[0].data"),
        (given(nested(JSON_LEVELS_MAX + 1)), "input[0].content[0].data"),
        (given({"a": [0] * (JSON_VALUES_MAX - 1)}), "input[0].content[0].data"),
        (given({"a": "x" * (JSON_BYTES_MAX - 7)}), "input[0].content[0].data"),
        ({"input": [{"type": "function_call_output", "call_id": "c1", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "custom_tool_call", "call_id": "c1", "name": "f"}]}, "input[0].input"),
        ({"safety_identifier": 5}, "safety_identifier"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (told({"type": "input_image", "image_url": "x"}), "input[0].content[0].type"),
        (told({"type": "input_json", "data": {}}, role="system"), "input[0].content[0].type"),
        (asked(instructions=[{"type": "input_image", "image_url": "x"}]), "questions[0].instructions[0].type"),
        ({"input": [{"type": "web_search_call", "id": "ws_1"}]}, "input[0].type"),
    ],
)
def test_what_is_no_text_is_refused_by_name(fields: dict[str, object], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        read(**fields)
    assert caught.value.param == param


def test_the_bounds_are_inclusive() -> None:
    assert len(read(questions=[PREDICATE] * QUESTIONS_MAX).questions) == QUESTIONS_MAX
    assert len(read(**chosen(*(str(n) for n in range(CHOICES_MAX)))).questions[0].options) == CHOICES_MAX
    assert len(read(**scored(*(str(n) for n in range(LEVELS_MAX)))).questions[0].options) == LEVELS_MAX
    read(**given(nested(JSON_LEVELS_MAX)))
    read(**given({"a": [0] * (JSON_VALUES_MAX - 2)}))
    read(**given({"a": "x" * (JSON_BYTES_MAX - 8)}))


def test_harmless_fields_are_accepted_and_unknown_ones_named() -> None:
    found = read(prompt_cache_key="k", prompt_cache_options={"mode": "explicit"}, safety_identifier="s", extra=1)
    assert found.ignored == ("extra",)
    assert found.task == read().task


def test_nulls_are_absent() -> None:
    absent = {"prompt_cache_key": None, "prompt_cache_options": None, "safety_identifier": None}
    assert read(**absent, **asked(name=None)).task == read().task


def test_msgpack_is_read_too() -> None:
    packed = msgspec.msgpack.encode({"model": "m", "input": "Help!", "questions": [PREDICATE, CHOICE, SCORE]})
    assert decode(packed, "msgpack").task == read(questions=[PREDICATE, CHOICE, SCORE]).task


def test_questions_become_texts() -> None:
    assert read(questions=[PREDICATE, CHOICE, SCORE]).task == Decide(
        messages=b'[{"role":"user","content":"Help!"}]',
        questions=(
            Question("predicate", "It is urgent."),
            Question("choice", "Who?", ("billing: Money.", "true", "true")),
            Question("score", "How bad?", ("low", "mid: So so.", "high")),
        ),
    )


def test_parts_of_instructions_are_lines() -> None:
    parts = [{"type": "input_text", "text": "As here?"}, {"type": "input_json", "data": {"a": [1, None]}}]
    assert read(**asked(instructions=parts)).questions[0].instructions == 'As here?\n{"a":[1,null]}'


def test_json_becomes_compact_text() -> None:
    (message,) = json.loads(read(**given([{"a": 1.5}, {"é": [True, None]}])).messages)
    assert message == {"role": "user", "content": '[{"a":1.5},{"é":[true,null]}]'}


def test_an_input_may_be_a_conversation() -> None:
    found = read(
        input=[
            {"role": "system", "content": "Be nice."},
            {"role": "user", "content": "Hi"},
            CALL,
            {"type": "function_call_output", "call_id": "c1", "output": "x"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "go"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "y"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "phase": "final_answer"},
        ]
    )
    assert [(message["role"], message["content"]) for message in json.loads(found.messages)] == [
        ("system", "Be nice."),
        ("user", "Hi"),
        ("assistant", None),
        ("tool", "x"),
        ("assistant", None),
        ("tool", "y"),
        ("assistant", "No."),
    ]
    assert json.loads(found.messages)[4]["tool_calls"][0]["function"] == {"name": "g", "arguments": '{"input":"go"}'}


def packed(*shares: float) -> bytes:
    return np.array(shares, "<f4").tobytes()


def answered(weights: Sequence[bytes], usage: Usage = Usage(), **fields: object) -> Decision:  # noqa: B008 (frozen)
    """The answer as OpenAI's client, which validates strictly, reads it."""
    content = formats.encode(read(**fields).answer(weights, model="m", usage=usage), "json")
    transport = httpx2.MockTransport(
        lambda request: httpx2.Response(200, content=content, headers={"content-type": "application/json"})
    )
    with openai.OpenAI(
        api_key="k",
        base_url="http://localhost/v1",
        http_client=httpx2.Client(transport=transport),
        _strict_response_validation=True,
    ) as client:
        return client.decisions.create(model="m", input="Help!", questions=[])


def test_an_answer_of_each_kind() -> None:
    weights = [packed(0.75), packed(0.25, 0.5, 0.25), packed(0.0, 0.5, 0.5)]
    found = answered(weights, Usage(input_tokens=9, cached_tokens=4), questions=[PREDICATE, CHOICE, SCORE])
    predicate, choice, score = found.answers
    assert isinstance(predicate, AnswerAnswerResourcePredicate)
    assert isinstance(choice, AnswerAnswerResourceChoice)
    assert isinstance(score, AnswerAnswerResourceScore)
    assert found.model == "m"
    assert (predicate.name, predicate.probability) == ("urgent", 0.75)
    assert (choice.name, choice.choice) == ("team", True)
    assert [(entry.value, entry.probability) for entry in choice.probabilities] == [
        ("billing", 0.25),
        (True, 0.5),
        ("true", 0.25),
    ]
    assert (score.name, score.score) == (None, 1.5)
    assert [(entry.value, entry.label, entry.probability) for entry in score.probabilities] == [
        (0, "low", 0.0),
        (1, "mid", 0.5),
        (2, "high", 0.5),
    ]
    assert score.confidence == pytest.approx(1 - math.log(2) / math.log(3))
    assert found.usage.to_dict() == {
        "input_tokens": 9,
        "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 9,
    }


def test_every_key_is_written() -> None:
    answer = read(questions=[SCORE]).answer([packed(1, 0, 0)], model="m", usage=Usage())
    (found,) = json.loads(formats.encode(answer, "json"))["answers"]
    assert found["type"] == "score"
    assert found["name"] is None


@pytest.mark.parametrize(
    ("shares", "confidence"),
    [((1, 0), 1), ((0, 1), 1), ((0.5, 0.5), 0), ((0.75, 0.25), 0.18872187554086717)],
)
def test_confidence_is_how_concentrated_the_probabilities_are(shares: tuple[float, ...], confidence: float) -> None:
    (found,) = answered([packed(*shares)], **chosen("a", "b")).answers
    assert isinstance(found, AnswerAnswerResourceChoice)
    assert found.confidence == pytest.approx(confidence)


def test_probabilities_sum_to_one() -> None:
    values = [str(n) for n in range(CHOICES_MAX)]
    shares = np.random.default_rng(0).dirichlet(np.ones(CHOICES_MAX)).astype("<f4")
    (found,) = answered([shares.tobytes()], **chosen(*values)).answers
    assert isinstance(found, AnswerAnswerResourceChoice)
    assert sum(entry.probability for entry in found.probabilities) == pytest.approx(1, abs=1e-12)
    assert found.choice == values[int(np.argmax(shares))]


@pytest.mark.parametrize(
    "weights",
    [
        [],
        [packed(1, 0)],
        [packed(1, 0), packed(1, 0)],
        [packed(0.5), packed(1)],
        [packed(0.5), packed(0.5, 0.25, 0.25)],
        [packed(0.5), b"\0\0\0"],
        [packed(math.nan), packed(1, 0)],
        [packed(0.5), packed(math.inf, 0)],
        [packed(1.5), packed(1, 0)],
        [packed(0.5), packed(1.5, -0.5)],
        [packed(0.5), packed(0.5, 0.25)],
        [packed(0.5), packed(0, 0)],
    ],
)
def test_weights_that_are_no_probabilities_are_no_answer(weights: list[bytes]) -> None:
    questions = [PREDICATE, *chosen("a", "b")["questions"]]
    with pytest.raises(BadVector):
        read(questions=questions).answer(weights, model="m", usage=Usage())


def test_body_and_answer_have_a_schema() -> None:
    """As the OpenAPI document wants of them."""
    _, components = msgspec.json.schema_components([DecisionsBody, decisions.Decision])
    assert components["DecisionsBody"]["properties"]["questions"]["maxItems"] == QUESTIONS_MAX
