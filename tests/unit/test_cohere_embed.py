"""`/v1/embed` and `/v2/embed` in Cohere's dialect: what is refused, and vectors in each type and form."""

import base64
import json
import uuid
from typing import Any

import msgspec
import numpy as np
import pytest

from appliance.compat.cohere_embed import EmbedCall, Vectors, answer, decode
from appliance.compat.cohere_meta import Version
from appliance.compat.formats import Format, encode
from appliance.errors import InvalidRequest, UnsupportedParameter

VERSIONS: tuple[Version, ...] = ("1", "2")
VECTORS = np.array([[0.5, -0.5, 0.5, 0.5, 0, 0, 0, 0], [-0.5, 0.5, 0.5, -0.5, 0, 0, 0, 0]], "<f4")
TYPES = ("float", "int8", "uint8", "binary", "ubinary", "base64")


def body(**fields: object) -> bytes:
    """A valid body with these fields laid over it."""
    return json.dumps({"model": "m", "texts": ["a", "b"]} | fields).encode()


def shown(call: EmbedCall, vectors: Vectors = VECTORS, *, form: Format = "json") -> dict[str, Any]:
    """The answer as a client reads it."""
    encoded = encode(answer(call, vectors, width=vectors.shape[1], input_tokens=7, form=form), form)
    found: dict[str, Any] = json.loads(encoded) if form == "json" else msgspec.msgpack.decode(encoded)
    return found


@pytest.mark.parametrize("version", VERSIONS)
def test_all_of_a_request_is_read(version: Version) -> None:
    call = decode(
        body(
            input_type="search_query",
            embedding_types=["int8", "float", "int8"],
            truncate="START",
            output_dimension=256,
            max_tokens=99,
            priority=3,
            extra=1,
        ),
        version,
    )

    assert (call.texts, call.field, call.types) == (("a", "b"), "texts", ("int8", "float"))
    assert (call.intent, call.truncation, call.width, call.tokens_max) == ("query", "start", 256, 99)
    assert (call.ignored, call.name_of(1)) == (("extra",), "texts[1]")


@pytest.mark.parametrize(
    ("input_type", "intent"),
    [
        ("search_document", "document"),
        ("search_query", "query"),
        ("classification", None),
        ("clustering", None),
        (None, None),
    ],
)
def test_an_input_type_is_an_intent(input_type: str | None, intent: str | None) -> None:
    assert decode(body(input_type=input_type), "2").intent == intent


def test_nulls_are_absent() -> None:
    names = ("inputs", "images", "input_type", "embedding_types", "truncate", "output_dimension", "max_tokens")

    call = decode(body(**dict.fromkeys(names), priority=None), "1")

    assert call == decode(body(), "1")
    assert (call.is_by_type, call.types, call.truncation) == (False, ("float",), None)


def test_a_model_is_left_out_on_the_first_version_only() -> None:
    assert decode(b'{"texts":["a"]}', "1").model is None
    with pytest.raises(InvalidRequest, match="missing required field 'model'"):
        decode(b'{"texts":["a"]}', "2")


def test_the_texts_of_an_input_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "more": 1}]

    call = decode(body(texts=None, inputs=[{"content": parts}, {"content": parts[:1]}]), "2")

    assert (call.texts, call.name_of(1)) == (("a\nb", "a"), "inputs[1]")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"texts": []}, "texts"),
        ({"texts": None}, "texts"),
        ({"texts": ["x"] * 97}, "texts"),
        ({"texts": ["x", ""]}, "texts[1]"),
        ({"texts": ["x", 1]}, "texts[1]"),
        ({"texts": "x"}, "texts"),
        ({"inputs": [{"content": [{"type": "text", "text": "a"}]}]}, "inputs"),
        ({"texts": [], "inputs": []}, "inputs"),
        ({"texts": None, "inputs": [{"content": []}]}, "inputs[0]"),
        ({"texts": None, "inputs": [{"content": [{"type": "text"}]}]}, "inputs[0].content[0]"),
        ({"texts": None, "inputs": [{"content": [{"type": "text", "text": ""}]}]}, "inputs[0].content[0]"),
        ({"texts": None, "inputs": [{"content": [{"text": "a"}]}]}, "inputs[0].content[0].type"),
        ({"input_type": "query"}, "input_type"),
        ({"embedding_types": []}, "embedding_types"),
        ({"embedding_types": ["float16"]}, "embedding_types[0]"),
        ({"truncate": "MIDDLE"}, "truncate"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"output_dimension": 0}, "output_dimension"),
        ({"output_dimension": 2**70}, "output_dimension"),
    ],
)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_wrong_field_is_named(fields: dict[str, object], param: str, version: Version) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(body(**fields), version)

    assert caught.value.param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"images": ["data:image/png;base64,AA=="]}, "images"),
        ({"input_type": "image"}, "input_type"),
        (
            {"texts": None, "inputs": [{"content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "inputs[0].content[0]",
        ),
    ],
)
def test_images_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        decode(body(**fields), "2")

    assert caught.value.param == param


def test_bare_floats_are_answered_to_the_first_version() -> None:
    found = shown(decode(body(), "1"))

    assert str(uuid.UUID(found["id"])) == found.pop("id")
    assert found == {
        "response_type": "embeddings_floats",
        "embeddings": VECTORS.tolist(),
        "texts": ["a", "b"],
        "meta": {"api_version": {"version": "1"}, "billed_units": {"input_tokens": 7}},
    }


@pytest.mark.parametrize(("version", "fields"), [("1", {"embedding_types": ["float"]}), ("2", {})])
def test_floats_are_answered_by_type(version: Version, fields: dict[str, object]) -> None:
    found = shown(decode(body(**fields), version))

    assert found["response_type"] == "embeddings_by_type"
    assert found["embeddings"] == {"float": VECTORS.tolist()}
    assert found["meta"]["api_version"] == {"version": version}


def test_every_type_is_what_cohere_says() -> None:
    found = shown(decode(body(embedding_types=TYPES), "2"))["embeddings"]

    # The range of eight numbers is all of -1 to 1: 8 / √8 is more than a number of a unit vector can be.
    assert found["int8"] == [[64, -64, 64, 64, 0, 0, 0, 0], [-64, 64, 64, -64, 0, 0, 0, 0]]
    assert found["uint8"] == [[192, 64, 192, 192, *[128] * 4], [64, 192, 192, 64, *[128] * 4]]
    assert found["ubinary"] == [[0b10110000], [0b01100000]]
    assert found["binary"] == [[0b10110000 - 128], [0b01100000 - 128]]
    assert [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in found["base64"]] == VECTORS.tolist()
    assert found["float"] == VECTORS.tolist()


@pytest.mark.parametrize("kind", TYPES)
def test_only_what_was_asked_for_is_there(kind: str) -> None:
    assert list(shown(decode(body(embedding_types=[kind]), "1"))["embeddings"]) == [kind]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("float", "<f4"), ("base64", "<f4"), ("int8", "i1"), ("uint8", "u1"), ("binary", "i1"), ("ubinary", "u1")],
)
def test_in_msgpack_a_vector_is_its_bytes(kind: str, dtype: str) -> None:
    call = decode(body(embedding_types=[kind]), "2")
    numbers = shown(decode(body(embedding_types=["float" if kind == "base64" else kind]), "2"))["embeddings"]

    found = shown(call, form="msgpack")["embeddings"][kind]

    assert [np.frombuffer(one, dtype).tolist() for one in found] == next(iter(numbers.values()))


def test_floats_survive_json() -> None:
    vectors = np.random.default_rng(0).normal(size=(2, 64)).astype("<f4")

    found = np.array(shown(decode(body(), "1"), vectors)["embeddings"], "<f4")

    assert found.tobytes() == vectors.tobytes()
