"""`/v1/tokenize` and `/v1/detokenize` in Cohere's dialect: what is refused, and the answers' shape."""

import json

import msgspec
import pytest

from appliance.compat.cohere_tokens import (
    TEXT_CHARS_MAX,
    TOKENS_MAX,
    decode_detokenize,
    decode_tokenize,
    detokenize_answer,
    tokenize_answer,
)
from appliance.errors import InvalidRequest
from appliance.jobs import Detokenize, Tokenize, Tokenized


@pytest.mark.parametrize("text", ["a", " ", "naïve ☃", "x" * TEXT_CHARS_MAX, "☃" * TEXT_CHARS_MAX])
def test_a_text_of_cohere_s_length_is_taken(text: str) -> None:
    call = decode_tokenize(json.dumps({"model": "m", "text": text}).encode())

    assert (call.model, call.task, call.ignored) == ("m", Tokenize(text), ())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": ""}, "text"),
        ({"text": "x" * (TEXT_CHARS_MAX + 1)}, "text"),
        ({"text": None}, "text"),
        ({"text": ["a"]}, "text"),
        ({"model": None}, "model"),
    ],
)
def test_another_text_is_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_tokenize(json.dumps({"model": "m", "text": "a"} | fields).encode())

    assert caught.value.param == param


@pytest.mark.parametrize("tokens", [[0], [2**31 - 1], [1] * TOKENS_MAX])
def test_tokens_are_taken(tokens: list[int]) -> None:
    call = decode_detokenize(json.dumps({"model": "m", "tokens": tokens, "more": 1}).encode())

    assert (call.task, call.ignored) == (Detokenize(tuple(tokens)), ("more",))


@pytest.mark.parametrize(
    ("tokens", "param"),
    [
        ([], "tokens"),
        ([1] * (TOKENS_MAX + 1), "tokens"),
        ([1, -1], "tokens[1]"),
        ([2**31], "tokens[0]"),
        ([2**70], "tokens[0]"),
        ([1.5], "tokens[0]"),
        ([True], "tokens[0]"),
        (["1"], "tokens[0]"),
        ([[1]], "tokens[0]"),
        (None, "tokens"),
    ],
)
def test_what_is_no_token_is_refused(tokens: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_detokenize(json.dumps({"model": "m", "tokens": tokens}).encode())

    assert caught.value.param == param


def test_msgpack_is_read_too() -> None:
    call = decode_detokenize(msgspec.msgpack.encode({"model": "m", "tokens": [1, 2]}), "msgpack")

    assert call.task == Detokenize((1, 2))


def test_the_answers_are_cohere_s() -> None:
    tokenized = msgspec.json.encode(tokenize_answer(Tokenized((7592, 102), ("hello", "[SEP]"))))
    text = msgspec.json.encode(detokenize_answer("hello"))

    meta = {"api_version": {"version": "1"}}
    assert json.loads(tokenized) == {"tokens": [7592, 102], "token_strings": ["hello", "[SEP]"], "meta": meta}
    assert json.loads(text) == {"text": "hello", "meta": meta}
