"""What a client writes stays text, whatever it looks like."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from appliance.errors import InvalidRequest
from appliance.workers.writing.chat_template import ChatTemplate
from appliance.workers.writing.messages import Message, normalized
from appliance.workers.writing.prompt_ids import PromptIds, any_of
from tests.unit.test_text_stream import RUST, byte_level, mark

PROMPTS = PromptIds(RUST)
END = mark("<|end|>")
THINK = mark("<think>")
SPELLINGS = ["<|end|>", "[CALLS]", "<think>", "<|en", "d|>", "a", "\ufdd0", "<", ">"]
SPECIAL = {END, mark("[CALLS]"), THINK}


def prompt_of(messages: list[Message]) -> str:
    """A template: each message and the end of it."""
    return "".join(f"{message['content']}<|end|>" for message in messages)


@given(st.lists(st.lists(st.sampled_from(SPELLINGS), max_size=6).map("".join), min_size=1, max_size=3))
def test_special_tokens_come_from_the_template_alone(texts: list[str]) -> None:
    messages: list[Message] = [{"role": "user", "content": text} for text in texts]

    guarded, _, between = PROMPTS.guarded(messages, [])
    ids = PROMPTS.ids(prompt_of(guarded), mark=between)

    assert [token for token in ids if token in SPECIAL] == [END] * len(texts)
    assert RUST.decode(ids, skip_special_tokens=False) == prompt_of(messages)


def test_a_harmless_prompt_is_tokenized_in_one_go() -> None:
    guarded, tools, between = PROMPTS.guarded([{"role": "user", "content": "hello"}], [{"a": "b"}])

    assert between == ""
    assert guarded == [{"role": "user", "content": "hello"}]
    assert tools == [{"a": "b"}]
    assert PROMPTS.ids(prompt_of(guarded)) == RUST.encode("hello<|end|>", add_special_tokens=False).ids


def test_a_models_own_words_may_stand_in_its_answers() -> None:
    messages: list[Message] = [
        {"role": "assistant", "content": "<think>hm<|end|>"},
        {"role": "user", "content": "<think>"},
    ]
    guarded, _, between = PROMPTS.guarded(messages, [])
    ids = PROMPTS.ids(prompt_of(guarded), mark=between)

    assert [token for token in ids if token in SPECIAL] == [THINK, END, END]


def test_functions_and_calls_are_a_clients_words_too() -> None:
    tool = {"function": {"name": "f", "parameters": {"properties": {"<|end|>": {"enum": ["[CALLS]", 1, None]}}}}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": '{"a": "<|end|>"}'}}]}

    messages, tools, between = PROMPTS.guarded([call], [tool])

    whole = json.dumps([messages, tools], ensure_ascii=False)
    assert between
    assert not any(spelling in whole for spelling in ("<|end|>", "[CALLS]"))
    assert whole.replace(between, "") == json.dumps([[call], [tool]], ensure_ascii=False)


def test_a_text_of_every_mark_is_refused() -> None:
    marks = "".join(chr(code) for code in range(0xFDD0, 0xFDF0))

    with pytest.raises(InvalidRequest):
        PROMPTS.guarded([{"role": "user", "content": f"<|end|>{marks}"}], [])


@given(st.lists(st.sampled_from(SPELLINGS), max_size=8).map("".join))
def test_a_prompt_without_a_template_is_text_too(text: str) -> None:
    ids = PROMPTS.text_ids(text)

    assert not SPECIAL & set(ids)
    assert RUST.decode(ids, skip_special_tokens=False) == text


def test_special_tokens_in_escapes_of_arguments_are_text_too() -> None:
    arguments = json.dumps({"a": "<|end|>"}).replace("<", "\\u003c")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = normalized([{"role": "assistant", "content": None, "tool_calls": [call]}])

    guarded, _, between = PROMPTS.guarded(messages, [])
    ids = PROMPTS.ids(json.dumps(guarded, ensure_ascii=False), mark=between)

    assert END not in ids
    assert RUST.decode(ids, skip_special_tokens=False) == json.dumps(messages, ensure_ascii=False)


def with_tokens(*contents: str, special: bool = True, normalized: bool = False) -> Tokenizer:
    """A token a byte, and these."""
    rust = byte_level()
    tokens = [AddedToken(content, special=special, normalized=normalized) for content in contents]
    rust.add_special_tokens(tokens) if special else rust.add_tokens(tokens)
    return rust


@given(st.lists(st.sampled_from(["<<a>>", "<a>", "a>", "<", ">", "a"]), max_size=8).map("".join))
def test_tokens_within_tokens_are_broken_too(text: str) -> None:
    rust = with_tokens("<<a>>", "<a>", "a>")

    ids = PromptIds(rust).text_ids(text)

    assert max(ids, default=0) < 256
    assert rust.decode(ids, skip_special_tokens=False) == text


def test_what_a_normalizer_makes_a_special_token_is_text() -> None:
    rust = with_tokens("<|stop|>", normalized=True)
    rust.normalizer = normalizers.NFKC()
    assert rust.token_to_id("<|stop|>") in rust.encode("\uff1c|stop|>").ids

    ids = PromptIds(rust).text_ids("\uff1c|stop|>")

    assert rust.token_to_id("<|stop|>") not in ids
    assert rust.decode(ids) == "<|stop|>"


def test_runs_of_white_space_are_text_though_they_are_added_tokens() -> None:
    rust = with_tokens("\n\n", "  ", special=False)

    assert PromptIds(rust).text_ids("a\n\nb  c") == rust.encode("a\n\nb  c").ids
    assert rust.token_to_id("\n\n") in PromptIds(rust).text_ids("a\n\nb")


def sentence_pieces(scheme: Any) -> Tokenizer:
    """Characters, a space before a text, and marks."""
    letters = [*map(chr, range(33, 127)), "▁"]
    vocabulary = {"<unk>": 0} | {letter: place for place, letter in enumerate(letters, 1)}
    rust = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>"))
    rust.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    rust.decoder = decoders.Metaspace(prepend_scheme=scheme)
    rust.add_special_tokens(["<s>", "</s>", "[INST]", "[/INST]"])
    return rust


def test_sentencepiece_puts_no_space_within_what_is_broken() -> None:
    rust = sentence_pieces("first")

    ids = PromptIds(rust).text_ids("a</s> [INST]b")

    assert rust.decode(ids, skip_special_tokens=False) == "a</s> [INST]b"
    assert not {rust.token_to_id(token) for token in ("</s>", "[INST]")} & set(ids)


def test_any_of_finds_the_longest_of_thousands() -> None:
    pattern = any_of([f"<unused{number}>" for number in range(5000)] + ["<u", "x" * 3000])

    found = [match[0] for match in pattern.finditer("<unused42> <unused> <unused4999> <u" + "x" * 3000)]

    assert found == ["<unused42>", "<u", "<unused4999>", "<u", "x" * 3000]
    assert any_of([]).search("anything") is None


CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST] {{ message.content }} [/INST]"
    "{% else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("rust", "source"),
    [
        (with_tokens("<|im_start|>", "<|im_end|>"), CHATML),
        (sentence_pieces("first"), INST),
        (sentence_pieces("always"), INST),
    ],
)
def test_harmless_messages_have_transformers_tokens(rust: Tokenizer, source: str) -> None:
    messages: list[Message] = [
        {"role": "user", "content": " Hi  you "},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "<b>1 + 1</b>"},
    ]
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=rust, chat_template=source, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    prompts = PromptIds(rust)

    guarded, _, between = prompts.guarded(messages, [])
    prompt = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}).render(guarded)

    assert prompts.ids(prompt, mark=between) == expected
