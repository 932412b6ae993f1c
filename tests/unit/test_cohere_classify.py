"""`/v1/classify` in Cohere's dialect: what is refused, and the answer's shape."""

import json
import uuid
from typing import Any

import msgspec
import numpy as np
import pytest

from appliance.compat.cohere_classify import EXAMPLES_MAX, answer, decode
from appliance.errors import InvalidRequest, UnsupportedParameter

EXAMPLES = [
    {"text": "win money", "label": "spam"},
    {"text": "lunch?", "label": "fine"},
    {"text": "free prize", "label": "spam"},
    {"text": "see you", "label": "fine"},
]


def body(**fields: object) -> bytes:
    """A valid body with these fields laid over it."""
    return json.dumps({"model": "m", "inputs": ["a", "b"], "examples": EXAMPLES} | fields).encode()


def test_examples_are_read_by_label() -> None:
    call = decode(body(truncate="START", more=1))

    assert call.labels == ("spam", "fine")
    assert call.example_labels == (0, 1, 0, 1)
    assert call.texts == ("win money", "lunch?", "free prize", "see you", "a", "b")
    assert [call.name_of(index) for index in (0, 3, 4, 5)] == [
        "examples[0].text",
        "examples[3].text",
        "inputs[0]",
        "inputs[1]",
    ]
    assert (call.truncation, call.ignored) == ("start", ("more",))


def test_nulls_are_absent() -> None:
    call = decode(body(examples=None, model=None, preset=None, truncate=None))

    assert (call.model, call.labels, call.truncation) == (None, (), None)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": ["a"] * 97}, "inputs"),
        ({"inputs": ["a", ""]}, "inputs[1]"),
        ({"inputs": "a"}, "inputs"),
        ({"inputs": [1]}, "inputs[0]"),
        ({"examples": EXAMPLES[:1]}, "examples"),
        ({"examples": EXAMPLES[:3]}, "examples"),
        ({"examples": [EXAMPLES[0], EXAMPLES[2]]}, "examples"),
        ({"examples": [*EXAMPLES, {"text": "x", "label": "third"}]}, "examples"),
        ({"examples": EXAMPLES * (EXAMPLES_MAX // 4) + EXAMPLES[:1]}, "examples"),
        ({"examples": [*EXAMPLES, {"text": "", "label": "spam"}]}, "examples[4].text"),
        ({"examples": [*EXAMPLES, {"label": "spam"}]}, "examples[4].text"),
        ({"examples": [*EXAMPLES, {"text": "x"}]}, "examples[4].label"),
        ({"examples": [*EXAMPLES, {"text": "x", "label": ""}]}, "examples[4].label"),
        ({"examples": [*EXAMPLES, {"text": "x", "label": 1}]}, "examples[4].label"),
        ({"truncate": "end"}, "truncate"),
    ],
)
def test_a_wrong_field_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(body(**fields))

    assert caught.value.param == param


def test_a_preset_is_not_served() -> None:
    with pytest.raises(UnsupportedParameter, match="'preset' is not served"):
        decode(body(preset="my-preset"))


@pytest.mark.parametrize("count", [4, EXAMPLES_MAX])
def test_as_many_examples_as_cohere_takes_are_taken(count: int) -> None:
    call = decode(body(inputs=["x"] * 96, examples=EXAMPLES * (count // 4)))

    assert len(call.example_texts) == count


def test_of_labels_that_exclude_each_other_one_is_predicted() -> None:
    found = _shown([[0.25, 0.75], [0.5, 0.5]], are_independent=False)

    assert found["meta"] == {"api_version": {"version": "1"}, "billed_units": {"classifications": 2}}
    ids = {found.pop("id"), *(one.pop("id") for one in found["classifications"])}
    assert len({uuid.UUID(one) for one in ids}) == 3
    assert found["classifications"] == [
        {
            "input": "a",
            "prediction": "fine",
            "predictions": ["fine"],
            "confidence": 0.75,
            "confidences": [0.75],
            "labels": {"spam": {"confidence": 0.25}, "fine": {"confidence": 0.75}},
            "classification_type": "single-label",
        },
        {
            "input": "b",
            "prediction": "spam",
            "predictions": ["spam"],
            "confidence": 0.5,
            "confidences": [0.5],
            "labels": {"spam": {"confidence": 0.5}, "fine": {"confidence": 0.5}},
            "classification_type": "single-label",
        },
    ]


def test_of_independent_labels_all_that_are_probable_are_predicted() -> None:
    both, none = _shown([[0.75, 0.875], [0.25, 0.125]], are_independent=True)["classifications"]

    assert both["classification_type"] == none["classification_type"] == "multi-label"
    assert both["prediction"] is both["confidence"] is none["prediction"] is None
    assert (both["predictions"], both["confidences"]) == (["fine", "spam"], [0.875, 0.75])
    assert (none["predictions"], none["confidences"]) == ([], [])
    assert none["labels"] == {"spam": {"confidence": 0.25}, "fine": {"confidence": 0.125}}


def _shown(confidences: list[list[float]], *, are_independent: bool) -> dict[str, Any]:
    found = answer(["a", "b"], ["spam", "fine"], np.array(confidences), are_independent=are_independent)
    shown: dict[str, Any] = json.loads(msgspec.json.encode(found))
    return shown
