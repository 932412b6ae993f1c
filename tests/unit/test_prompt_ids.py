"""What a client writes stays text, whatever it looks like."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import InvalidRequest
from appliance.workers.writing.messages import Message
from appliance.workers.writing.prompt_ids import PromptIds
from tests.unit.test_text_stream import RUST, mark

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
