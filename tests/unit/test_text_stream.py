"""Tokens to text that is safe to send."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from appliance.workers.writing.text_stream import Stops, TextStream, overlap
from appliance.workers.writing.token_bytes import TokenBytes

LETTERS = pre_tokenizers.ByteLevel.alphabet()


def byte_level() -> Tokenizer:
    """A token a byte, and marks."""
    rust = Tokenizer(models.BPE({letter: number for number, letter in enumerate(sorted(LETTERS))}, []))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("[CALLS]", special=True)])
    rust.add_tokens([AddedToken("<think>", special=False)])
    return rust


def sentence_pieces() -> Tokenizer:
    """Whole words, and bytes for what is none."""
    vocabulary = {"<unk>": 0, "▁hello": 1, "▁world": 2, "▁": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    rust = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    rust.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return rust


RUST = byte_level()
TOKENS = TokenBytes(RUST)


def mark(content: str) -> int:
    """The number of a token that stands for itself."""
    found: int | None = RUST.token_to_id(content)
    assert found is not None
    return found


def ids_of(text: str) -> list[int]:
    return list(RUST.encode(text, add_special_tokens=False).ids)


def written(ids: Sequence[int], stream: TextStream, cuts: Sequence[int] = ()) -> str:
    """What a stream makes of tokens that come in pieces."""
    pieces = [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    return "".join(stream.push(piece) for piece in pieces) + stream.flush()


@given(st.text(max_size=40), st.lists(st.integers(0, 80), max_size=5))
def test_any_text_comes_back_however_its_tokens_come(text: str, places: list[int]) -> None:
    ids = RUST.encode(text.replace("<", "(").replace("[", "("), add_special_tokens=False).ids
    cuts = sorted(min(place, len(ids)) for place in places)

    assert written(ids, TextStream(TOKENS), cuts) == text.replace("<", "(").replace("[", "(")


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4))
def test_a_text_ends_before_its_first_stop_string(text: str, stops: list[str]) -> None:
    reader = Stops(stops)

    found = "".join(map(reader.feed, text)) + reader.flush()

    # The first that is complete as the text comes ends it, the longest of those.
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    end, _, stop = min(ends, default=(len(text), 0, ""))
    assert (found, reader.found) == (text[: end - len(stop)], stop)


@given(
    st.text("ab<é", max_size=30),
    st.lists(st.text("abé", min_size=1, max_size=4), max_size=4),
    st.lists(st.integers(0, 30), max_size=5),
)
def test_how_the_text_comes_changes_nothing(text: str, stops: list[str], places: list[int]) -> None:
    cuts = sorted(min(place, len(text)) for place in places)
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    one, other = Stops(stops), Stops(stops)

    by_character = "".join(map(one.feed, text)) + one.flush()
    in_pieces = "".join(map(other.feed, pieces)) + other.flush()

    assert (by_character, one.found) == (in_pieces, other.found)


def test_nothing_that_may_become_a_stop_string_is_sent() -> None:
    stops = Stops(["\nUser:"])

    sent = [stops.feed(character) for character in "Hi\nUse me\nUser: more"]

    assert "".join(sent) == "Hi\nUse me"
    assert stops.found == "\nUser:"
    assert (stops.feed("x"), stops.flush()) == ("", "")


def test_a_character_is_sent_whole() -> None:
    stream = TextStream(TOKENS)

    sent = [stream.push([token]) for token in ids_of("né🦜")]

    assert [piece for piece in sent if piece] == ["n", "é", "🦜"]


def test_half_a_character_at_the_end_is_told_as_such() -> None:
    stream = TextStream(TOKENS)

    assert stream.push(ids_of("🦜")[:2]) == ""
    assert stream.flush() == "\ufffd"


def test_special_tokens_are_not_text_unless_a_parser_wants_them() -> None:
    ids = [*ids_of("a"), mark("<|end|>"), mark("[CALLS]"), mark("<think>")]

    assert written(ids, TextStream(TOKENS)) == "a<think>"
    assert written(ids, TextStream(TOKENS, shown={mark("[CALLS]")})) == "a[CALLS]<think>"


def test_sentencepiece_loses_its_first_space_alone() -> None:
    tokens = TokenBytes(sentence_pieces())
    parrot = [4 + byte for byte in "🦜".encode()]

    assert written([1, 2, 3, *parrot, 1], TextStream(tokens)) == "hello world 🦜 hello"
    assert tokens.of(1) == b" hello"


def test_a_text_that_goes_on_keeps_its_first_space() -> None:
    assert written([1, 2], TextStream(TokenBytes(sentence_pieces()), goes_on=True)) == " hello world"


@pytest.mark.parametrize(
    ("decoder", "drops"),
    [
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), False),
        (decoders.Metaspace(prepend_scheme="never"), False),
        (decoders.Metaspace(prepend_scheme="always"), True),
        (decoders.Metaspace(prepend_scheme="first"), True),
    ],
)
def test_the_decoder_says_whether_the_first_space_is_one(decoder: decoders.Decoder, drops: bool) -> None:
    rust = sentence_pieces()
    rust.decoder = decoder

    assert written([1, 2], TextStream(TokenBytes(rust))) == rust.decode([1, 2]) == (" hello world"[drops:])


def test_numbers_that_are_no_tokens_say_nothing() -> None:
    assert TOKENS.of(1_000_000) == b""
    assert TextStream(TOKENS).push([1_000_000]) == ""


def test_a_vocabulary_of_another_kind_is_refused() -> None:
    rust = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))

    with pytest.raises(ValueError, match="bytes"):
        TokenBytes(rust)


@pytest.mark.parametrize(
    ("text", "mark", "size"), [("", "ab", 0), ("xa", "ab", 1), ("xab", "ab", 0), ("aa", "aab", 2), ("ba", "aab", 1)]
)
def test_overlap_is_the_longest_beginning_of_a_mark(text: str, mark: str, size: int) -> None:
    assert overlap(text, mark) == size
