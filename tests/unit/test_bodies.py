"""What is wrong with a body is told in words for who sent it, and never in the decoder's own."""

from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from appliance.compat.bodies import BodyDecoder, decoded_part
from appliance.compat.field_words import words_at
from appliance.errors import InvalidRequest, MalformedBody


class Named(msgspec.Struct, frozen=True, tag="named"):
    name: str


class Shaped(msgspec.Struct, frozen=True, tag="shaped"):
    shape: Literal["round", "square"] | None = None


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=1, le=16)] = 1
    share: Annotated[float, Meta(ge=0, lt=1.5)] = 0
    way: Literal["left", "right"] | Annotated[str, Meta(max_length=0)] | None = None
    mode: Literal["fast", "slow"] = "fast"
    choice: Literal["none", "auto"] | dict[str, Literal["a", "b"]] | None = None
    parts: tuple[Named | Shaped, ...] = ()
    word: Annotated[str, Meta(max_length=3)] = ""
    few: Annotated[list[str], Meta(min_length=1)] | None = None
    inner: Shaped = Shaped()


BODIES = BodyDecoder(Sample)
NAMED: msgspec.json.Decoder[list[Named | Shaped]] = msgspec.json.Decoder(list[Named | Shaped])


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({"size": 17}, "'size' must be at most 16", "size"),
        ({"size": 0}, "'size' must be at least 1", "size"),
        ({"size": "x"}, "'size' must be an integer, not a string", "size"),
        ({"size": None}, "'size' must be an integer, not null", "size"),
        ({"share": 1.5}, "'share' must be less than 1.5", "share"),
        ({"share": -1}, "'share' must be at least 0", "share"),
        ({"choice": 5}, "'choice' must be a string, an object or null, not an integer", "choice"),
        ({"word": "long"}, "'word' must have at most 3 characters", "word"),
        ({"few": []}, "'few' must have at least 1 item", "few"),
        ({"mode": "odd"}, "'mode' is 'odd'; it must be one of fast, slow", "mode"),
        ({"mode": "o" * 500}, "'mode' is '" + "o" * 99 + "; it must be one of fast, slow", "mode"),
        ({"choice": "odd"}, "'choice' is 'odd'; it must be one of auto, none", "choice"),
        ({"choice": {"x": "odd"}}, "'choice' is 'odd'; it must be one of a, b", "choice"),
        ({"inner": {"shape": "odd"}}, "'inner.shape' is 'odd'; it must be one of round, square", "inner.shape"),
        ({"parts": [{"type": "named"}]}, "missing required field 'parts[0].name'", "parts[0].name"),
        ({"parts": [{"type": "odd"}]}, "'parts[0].type' is 'odd'; it must be one of named, shaped", "parts[0].type"),
        ({"parts": 5}, "'parts' must be an array, not an integer", "parts"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("more", [{}, {"unknown": 1}])
def test_a_wrong_field_is_told_with_what_it_must_be(
    body: dict[str, Any], message: str, param: str, more: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        BODIES.decode(msgspec.json.encode({**body, **more}))

    assert (refused.value.message, refused.value.param) == (message, param)
    assert not isinstance(refused.value, MalformedBody)


def test_a_part_that_is_decoded_apart_is_told_like_the_body_it_is_of() -> None:
    with pytest.raises(InvalidRequest) as refused:
        decoded_part(msgspec.Raw(b'[{"type":"named","name":"a"},{"type":"odd"}]'), NAMED, "items")

    assert refused.value.message == "'items[1].type' is 'odd'; it must be one of named, shaped"
    assert refused.value.param == "items[1].type"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the request body is empty; send a JSON object"),
        (b"{", "the request body is not valid JSON: it ends too early"),
        (b"{]", "the request body is not valid JSON: object keys must be strings (byte 1)"),
        (b'{"word": "\xff"}', "the request body is not valid JSON: it is no UTF-8"),
        (b"[1]", "the request body must be an object, not an array"),
        (b'{"unknown": ' + b"[" * 100_000, "the request body is not valid JSON: nested too deeply"),
    ],
)
def test_what_is_no_body_says_why(body: bytes, message: str) -> None:
    with pytest.raises(MalformedBody) as refused:
        BODIES.decode(body)

    assert refused.value.message == message


@pytest.mark.parametrize("path", ["nothing", "word", "size", "parts[0].name", "mode.more", "choice[0]", ""])
def test_a_field_that_is_not_chosen_from_words_has_none(path: str) -> None:
    assert words_at(Sample, path) == ()
