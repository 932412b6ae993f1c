"""`POST /v1/embeddings` in OpenAI's dialect: what is refused and how it is told, and vectors unchanged."""

import base64
import json
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.compat import openai_embeddings
from appliance.compat.bodies import IGNORED_NAMES_MAX, BodyDecoder
from appliance.compat.openai_embeddings import DIMENSIONS_MAX, INPUTS_MAX, EmbeddingsCall, decode, encode
from appliance.errors import InvalidRequest, MalformedBody, UnsupportedParameter
from appliance.jobs import Embed


def body(**fields: object) -> bytes:
    """A valid body with these fields laid over it."""
    return json.dumps({"model": "m", "input": "a text"} | fields).encode()


def deep(levels: int) -> bytes:
    return b'{"model":"m","input":"x","extra":' + b"[" * levels + b"]" * levels + b"}"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b" \n",
        b"[]",
        b"null",
        b"1",
        b'"text"',
        b"{",
        b"not json",
        b'{"model":"m","input":"x"',
        b'{"model":"m","input":"x"} trailing',
        b'{"model":"m","input":NaN}',
        b'{"model":"m","input":"x","extra":NaN}',
        b'{"model":"m","input":"x","dimensions":Infinity}',
        b'\xef\xbb\xbf{"model":"m","input":"x"}',
        b'{"model":"m","input":"\xff"}',
        b'{"model":"m","input":"\xed\xa0\x80"}',
        b'{"model":"m","input":"a\x00b"}',
        rb'{"model":"m","input":"\ud800"}',
        rb'{"model":"m","input":"\udc00"}',
        rb'{"model":"\ud800 and more","input":"x"}',
        rb'{"model":"m","input":"x","\udc00":1}',
        deep(100_000),
    ],
)
def test_what_is_no_json_object_is_malformed(sent: bytes) -> None:
    with pytest.raises(MalformedBody, match="the request body") as caught:
        decode(sent)
    assert caught.value.param is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"model": 7}, "model"),
        ({"input": None}, "input"),
        ({"input": 7}, "input"),
        ({"input": {}}, "input"),
        ({"input": True}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": ["a", None]}, "input[1]"),
        ({"input": [True]}, "input[0]"),
        ({"input": ["a", 1.5]}, "input[1]"),
        ({"input": ["a", 1]}, "input[1]"),
        ({"input": ["a", [1]]}, "input[1]"),
        ({"input": [["a"]]}, "input[0][0]"),
        ({"input": [[[1]]]}, "input[0][0]"),
        ({"input": ["a", {"text": "b"}]}, "input[1]"),
        ({"input": ["a"] * (INPUTS_MAX + 1)}, "input"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"encoding_format": "an unknown field"}, "encoding_format"),
        ({"encoding_format": 1}, "encoding_format"),
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": -1}, "dimensions"),
        ({"dimensions": DIMENSIONS_MAX + 1}, "dimensions"),
        ({"dimensions": 10**30}, "dimensions"),
        ({"dimensions": 10**4000}, "dimensions"),
        ({"dimensions": "8"}, "dimensions"),
        ({"dimensions": 8.5}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"user": 5}, "user"),
        ({"input_type": "passage"}, "input_type"),
    ],
)
def test_a_field_at_fault_is_named(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(body(**fields))

    assert caught.value.param == param
    assert not isinstance(caught.value, MalformedBody)
    assert param.partition("[")[0] in caught.value.message


@pytest.mark.parametrize("missing", ["model", "input"])
def test_a_missing_field_is_named(missing: str) -> None:
    fields = {"model": "m", "input": "x"}
    del fields[missing]

    with pytest.raises(InvalidRequest, match=f"missing required field '{missing}'") as caught:
        decode(json.dumps(fields).encode())
    assert caught.value.param == missing


def test_a_wrong_field_is_named_beside_an_unknown_one() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(b'{"unknown": 1, "model": "m", "input": 5}')
    assert caught.value.param == "input"


def test_digits_without_end_are_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(b'{"model":"m","input":"x","dimensions":' + b"9" * 5000 + b"}")
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize("tokens", [[1, 2], [[1, 2], [3]], [[]], [1, "a"]])
def test_token_ids_are_refused_by_name(tokens: object) -> None:
    with pytest.raises(UnsupportedParameter, match=r"token ids; send text.*LangChain") as caught:
        decode(body(input=tokens))
    assert caught.value.param == "input"


def test_explicit_nulls_mean_absent() -> None:
    call = decode(body(encoding_format=None, dimensions=None, user=None, input_type=None))

    assert call == EmbeddingsCall("m", ("a text",), "float", None, None, ())


def test_what_is_asked_for_is_kept() -> None:
    call = decode(
        body(input=["a", "b\x00", "😀"], encoding_format="base64", dimensions=8, user="u", input_type="query")
    )

    assert call == EmbeddingsCall("m", ("a", "b\x00", "😀"), "base64", 8, "query", ())
    assert call.task(1, 3) == Embed(inputs=("b\x00", "😀"), intent="query", width=8)


def test_as_many_inputs_as_allowed_are_taken() -> None:
    assert len(decode(body(input=["a"] * INPUTS_MAX)).inputs) == INPUTS_MAX


def test_unknown_fields_are_ignored_and_told() -> None:
    call = decode(body(zebra=1, apple={"nested": ["x"]}, big=10**4000))

    assert call.inputs == ("a text",)
    assert call.ignored == ("zebra", "apple", "big")


def test_unknown_fields_are_told_up_to_a_limit() -> None:
    unknown = {f"x{number}": number for number in range(IGNORED_NAMES_MAX + 5)}

    assert decode(body(**unknown)).ignored == tuple(unknown)[:IGNORED_NAMES_MAX]


def test_an_unknown_field_may_be_nested_within_reason() -> None:
    assert decode(deep(500)).ignored == ("extra",)


class NotStrict(msgspec.Struct, frozen=True):
    name: str


def test_a_struct_that_takes_anything_is_no_strict_one() -> None:
    with pytest.raises(AssertionError):
        BodyDecoder(NotStrict)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=10), inner, max_size=3),
    max_leaves=8,
)
fields = st.sampled_from(["model", "input", "encoding_format", "dimensions", "user", "input_type", "extra"])


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(fields, json_values).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60))
def test_any_body_is_taken_or_refused_in_our_words(sent: bytes) -> None:
    refusal: InvalidRequest | None = None
    try:
        call = decode(sent)
    except InvalidRequest as error:
        refusal = error
    else:
        assert call.inputs
        assert all(call.inputs)
    assert refusal is None or refusal.message


def call_of(encoding_format: openai_embeddings.EncodingFormat, *, inputs: int) -> EmbeddingsCall:
    return EmbeddingsCall("m", ("x",) * inputs, encoding_format, None, None, ())


def answer_of(call: EmbeddingsCall, parts: list[bytes], *, width: int) -> Any:
    return json.loads(encode(call, [memoryview(part) for part in parts], width=width, input_tokens=7))


floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5).flatmap(lambda width: st.lists(st.lists(floats, min_size=width, max_size=width), min_size=1)))
def test_both_forms_give_the_same_float32(vectors: list[list[float]]) -> None:
    expected = np.array(vectors, dtype="<f4")
    count, width = expected.shape

    as_float = answer_of(call_of("float", inputs=count), [expected.tobytes()], width=width)
    as_base64 = answer_of(call_of("base64", inputs=count), [expected.tobytes()], width=width)

    read = np.array([one["embedding"] for one in as_float["data"]], dtype="<f4")
    assert read.tobytes() == expected.tobytes()
    joined = b"".join(base64.b64decode(one["embedding"], validate=True) for one in as_base64["data"])
    assert joined == expected.tobytes()


@pytest.mark.parametrize("encoding_format", ["float", "base64"])
def test_the_answer_has_openais_shape(encoding_format: openai_embeddings.EncodingFormat) -> None:
    rows = np.arange(6, dtype="<f4").reshape(3, 2)

    answer = answer_of(call_of(encoding_format, inputs=3), [rows[:2].tobytes(), rows[2:].tobytes()], width=2)

    assert set(answer) == {"object", "data", "model", "usage"}
    assert (answer["object"], answer["model"]) == ("list", "m")
    assert answer["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert [(one["object"], one["index"]) for one in answer["data"]] == [("embedding", index) for index in range(3)]
    last = answer["data"][2]["embedding"]
    assert last == ([4.0, 5.0] if encoding_format == "float" else base64.b64encode(rows[2].tobytes()).decode())
