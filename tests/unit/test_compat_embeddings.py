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
from appliance.compat.openai_embeddings import INPUTS_MAX, EmbeddingsBody, EmbeddingsCall, decode, encode
from appliance.compat.token_ids import ARRAY_IDS_MAX, REQUEST_IDS_MAX
from appliance.compat.widths import WIDTH_MAX, Widths
from appliance.errors import InvalidRequest, MalformedBody, UnsupportedParameter
from appliance.jobs import Intent, Output, Part, Rows, SparseRow, SparseRows, TokenRows, Truncation


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
        ({"dimensions": WIDTH_MAX + 1}, "dimensions"),
        ({"dimensions": 10**30}, "dimensions"),
        ({"dimensions": 10**4000}, "dimensions"),
        ({"dimensions": "8"}, "dimensions"),
        ({"dimensions": 8.5}, "dimensions"),
        ({"dimensions": True}, "dimensions"),
        ({"user": 5}, "user"),
        ({"input_type": "image"}, "input_type"),
        ({"input_type": 5}, "input_type"),
        ({"input": [1, "a"]}, "input"),
        ({"input": [1, [2]]}, "input"),
        ({"input": [1, True]}, "input[1]"),
        ({"input": [1, 2.5]}, "input[1]"),
        ({"input": [[]]}, "input[0]"),
        ({"input": [[1], "a"]}, "input[1]"),
        ({"input": [[1], 2]}, "input[1]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [1] * (ARRAY_IDS_MAX + 1)}, "input"),
        ({"input": [[1], [1] * (ARRAY_IDS_MAX + 1)]}, "input[1]"),
        ({"input": [[1] * ARRAY_IDS_MAX] * (REQUEST_IDS_MAX // ARRAY_IDS_MAX + 1)}, "input"),
        ({"input": [[1]] * (INPUTS_MAX + 1)}, "input"),
        ({"outputs": []}, "outputs"),
        ({"outputs": ["colbert"]}, "outputs[0]"),
        ({"task": "retrieval"}, "task"),
        ({"embedding_type": "int8"}, "embedding_type"),
        ({"output_dtype": "base64"}, "output_dtype"),
        ({"output_dimension": 0}, "output_dimension"),
        ({"dimensions": 8, "output_dimension": 9}, "output_dimension"),
        ({"truncate": True, "truncation": False}, "truncation"),
        ({"embedding_type": "binary", "output_dtype": "ubinary"}, "output_dtype"),
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


@pytest.mark.parametrize(
    ("tokens", "expected"), [([1, 2], ((1, 2),)), ([[1, 2], [3]], ((1, 2), (3,))), ([2**70], ((2**70,),))]
)
def test_token_ids_are_one_input_or_several(tokens: object, expected: tuple[tuple[int, ...], ...]) -> None:
    call = decode(body(input=tokens))

    assert (call.texts, call.ids) == ((), expected)


@pytest.mark.parametrize(
    "fields", [{"late_chunking": True}, {"normalized": False}, {"embedding_type": ["float", "binary"]}]
)
def test_what_is_not_served_is_refused_by_name(fields: dict[str, object]) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        decode(body(**fields))
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"input_type": "query"}, "query"),
        ({"input_type": "search_document"}, "document"),
        ({"input_type": "clustering"}, None),
        ({"task": "retrieval.query"}, "query"),
        ({"task": "retrieval.passage"}, "document"),
        ({"task": "retrieval.passage", "input_type": "query"}, "query"),
    ],
)
def test_every_dialect_says_what_its_inputs_are(fields: dict[str, object], expected: Intent | None) -> None:
    assert decode(body(**fields)).intent == expected


@pytest.mark.parametrize(
    ("fields", "numbers", "is_base64"),
    [
        ({}, "float", False),
        ({"encoding_format": "base64"}, "float", True),
        ({"embedding_type": "base64"}, "float", True),
        ({"embedding_type": ["ubinary"]}, "ubinary", False),
        ({"output_dtype": "int8", "encoding_format": "base64"}, "int8", True),
        ({"output_dtype": "binary", "embedding_type": "binary"}, "binary", False),
    ],
)
def test_every_dialect_says_what_numbers_it_wants(fields: dict[str, object], numbers: str, is_base64: bool) -> None:
    call = decode(body(**fields))

    assert (call.numbers, call.is_base64) == (numbers, is_base64)


@pytest.mark.parametrize(
    ("fields", "policy", "outputs", "expected"),
    [
        ({}, "end", ("dense",), "end"),
        ({}, "none", ("dense",), "none"),
        ({}, "chunk_mean", ("dense",), "chunk_mean"),
        ({}, "chunk_mean", ("dense", "sparse"), "end"),
        ({"truncate": True}, "none", ("dense",), "end"),
        ({"truncation": False}, "chunk_mean", ("dense",), "none"),
    ],
)
def test_the_clients_word_on_long_texts_wins(
    fields: dict[str, object], policy: Truncation, outputs: tuple[Output, ...], expected: Truncation
) -> None:
    assert decode(body(**fields)).truncation(policy, outputs) == expected


def test_the_path_may_name_the_model() -> None:
    assert decode(b'{"input": "x"}', model="of-the-path").model == "of-the-path"
    assert decode(b'{"input": "x", "model": "m"}', model="of-the-path").model == "of-the-path"


def test_explicit_nulls_mean_absent() -> None:
    call = decode(body(encoding_format=None, dimensions=None, user=None, input_type=None))

    assert call == decode(body())
    assert (call.width, call.intent, call.outputs, call.may_cut, call.ignored) == (None, None, None, None, ())


def test_what_is_asked_for_is_kept() -> None:
    call = decode(
        body(input=["a", "b\x00", "😀"], encoding_format="base64", dimensions=8, user="u", input_type="query")
    )

    assert (call.model, call.texts, call.is_base64) == ("m", ("a", "b\x00", "😀"), True)
    assert (call.width, call.intent) == (8, "query")


def test_as_many_inputs_as_allowed_are_taken() -> None:
    assert len(decode(body(input=["a"] * INPUTS_MAX)).texts) == INPUTS_MAX


def test_unknown_fields_are_ignored_and_told() -> None:
    call = decode(body(zebra=1, apple={"nested": ["x"]}, big=10**4000))

    assert call.texts == ("a text",)
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
fields = st.sampled_from([*(field.name for field in msgspec.structs.fields(EmbeddingsBody)), "extra"])


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(fields, json_values).map(lambda value: json.dumps(value).encode()) | st.binary(max_size=60))
def test_any_body_is_taken_or_refused_in_our_words(sent: bytes) -> None:
    refusal: InvalidRequest | None = None
    try:
        call = decode(sent)
    except InvalidRequest as error:
        refusal = error
    else:
        assert call.texts or call.ids
        assert all(call.texts)
        assert all(call.ids)
    assert refusal is None or refusal.message


def call_of(encoding_format: openai_embeddings.EncodingFormat, *, inputs: int) -> EmbeddingsCall:
    return decode(body(input=["x"] * inputs, encoding_format=encoding_format))


def answer_of(call: EmbeddingsCall, parts: list[bytes], *, width: int) -> Any:
    return json.loads(encode(call, [Rows(part, width) for part in parts], widths=Widths(), input_tokens=7))


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


def parts_of(*, count: int = 2) -> list[Part]:
    """Of so many inputs: [0.6, 0.8]; two tokens each; the weights of the ids 3 and 5."""
    one = np.array([0.6, 0.8], "<f4").tobytes()
    weights = SparseRow(np.array([3, 5], "<i4").tobytes(), np.array([0.5, 1.5], "<f4").tobytes())
    return [Rows(one * count, 2), TokenRows((one * 2,) * count, 2), SparseRows((weights,) * count)]


def test_other_outputs_stand_beside_the_vector() -> None:
    call = decode(body(input=["x", "y"], outputs=["multivector", "sparse"]))

    found = json.loads(encode(call, parts_of()[1:], widths=Widths(), input_tokens=7))

    assert found["data"][1] == {
        "object": "embedding",
        "index": 1,
        "embedding": [],
        "sparse": {"indices": [3, 5], "values": [0.5, 1.5]},
        "multivector": [[pytest.approx(0.6), pytest.approx(0.8)]] * 2,
    }


def test_in_msgpack_every_vector_is_bytes() -> None:
    call = decode(body(input=["x", "y"], outputs=["dense", "multivector", "sparse"]))

    found = msgspec.msgpack.decode(encode(call, parts_of(), widths=Widths(), input_tokens=7, form="msgpack"))

    one = np.array([0.6, 0.8], "<f4").tobytes()
    assert found["data"][0]["embedding"] == one
    assert found["data"][0]["multivector"] == [one, one]
    assert found["data"][1]["sparse"]["indices"] == np.array([3, 5], "<i4").tobytes()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"output_dtype": "int8"}, [round(127 * 0.6), round(127 * 0.8), 0]),
        ({"output_dtype": "ubinary"}, [0b11000000]),
        ({"embedding_type": "binary"}, [0b11000000 - 128]),
        ({}, [pytest.approx(0.6), pytest.approx(0.8), 0]),
    ],
)
def test_numbers_of_a_byte_or_a_bit_of_padded_vectors(fields: dict[str, object], expected: list[object]) -> None:
    call = decode(body(**fields))

    found = json.loads(encode(call, parts_of(count=1)[:1], widths=Widths(None, 3), input_tokens=7))

    assert found["data"][0]["embedding"] == expected


def test_bytes_in_base64() -> None:
    call = decode(body(output_dtype="uint8", encoding_format="base64"))

    found = json.loads(encode(call, parts_of(count=1)[:1], widths=Widths(), input_tokens=7))

    assert list(base64.b64decode(found["data"][0]["embedding"])) == [128 + round(127 * 0.6), 128 + round(127 * 0.8)]
