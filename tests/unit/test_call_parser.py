"""Function calls in the text of a model, by style, however the text comes."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.workers.writing.call_parser import HEAD_CHARS_MAX, CallParser, ReasoningParser, Said
from appliance.workers.writing.tool_styles import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, Style, style_of

NAMES = ["get", "set_it"]


def parsed(text: str, style: Style, *, size: int = 1) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls, of a text that comes in pieces of `size` characters."""
    parser = CallParser(style, NAMES)
    said: list[Said] = []
    for start in range(0, len(text), size):
        said += parser.feed(text[start : start + size])
    said += parser.end()
    calls: dict[int, list[str]] = {}
    for piece in said:
        if piece.call is not None:
            found = calls.setdefault(piece.call.index, ["", ""])
            assert not (piece.call.name and found[0]), "a name comes once"
            found[0] += piece.call.name
            found[1] += piece.call.arguments
    return "".join(piece.text for piece in said), [(name, arguments) for name, arguments in calls.values()]


HERMES_CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "a}\\"b", "n": [1, {}]}}\n</tool_call>'
CASES = [
    (HERMES, "just text <b> and {}", "just text <b> and {}", []),
    (HERMES, f"Well.\n{HERMES_CALL}", "Well.\n", [("get", '{"city": "a}\\"b", "n": [1, {}]}')]),
    (
        HERMES,
        '<tool_call>{"name":"get","arguments":{}}</tool_call>\n<tool_call>{"name":"set_it","parameters":{"a":1}}</tool_call>',
        "",
        [("get", "{}"), ("set_it", '{"a":1}')],
    ),
    (HERMES, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>', None, []),
    (HERMES, "<tool_call>nonsense</tool_call> and on", "<tool_call>nonsense</tool_call> and on", []),
    (HERMES, f"{HERMES_CALL} That is all.", " That is all.".strip(), [("get", '{"city": "a}\\"b", "n": [1, {}]}')]),
    (HERMES, "ends with <tool_", "ends with <tool_", []),
    (HERMES, f"\n\n{HERMES_CALL}", "", [("get", '{"city": "a}\\"b", "n": [1, {}]}')]),
    (HERMES, "\n <tool_call>nonsense</tool_call>", "\n <tool_call>nonsense</tool_call>", []),
    (HERMES, '<tool_call>\n{"name": "get", "arguments": 42}\n</tool_call>', "", [("get", "42")]),
    (HERMES, '<tool_call>\n{"name": "get", "arguments": "a}\\""}\n</tool_call>', "", [("get", '"a}\\""')]),
    (LLAMA, '{"name": "get", "parameters": {"a": 1}}', "", [("get", '{"a": 1}')]),
    (
        LLAMA,
        '{"type": "function", "name": "get", "parameters": {}}; {"name": "set_it", "parameters": {"b": 2}}',
        "",
        [("get", "{}"), ("set_it", '{"b": 2}')],
    ),
    (LLAMA, 'No call: {"name": "get", "parameters": {}}', 'No call: {"name": "get", "parameters": {}}', []),
    (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
    (
        MISTRAL,
        '[TOOL_CALLS][{"name": "get", "arguments": {"a": 1}}, {"name": "set_it", "arguments": {}}]',
        "",
        [("get", '{"a": 1}'), ("set_it", "{}")],
    ),
    (
        MISTRAL_ARGS,
        'Hm.[TOOL_CALLS]get[ARGS]{"a": 1}[TOOL_CALLS]set_it[ARGS]{}',
        "Hm.",
        [("get", '{"a": 1}'), ("set_it", "{}")],
    ),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("style", "text", "words", "calls"), CASES)
def test_calls_are_parted_from_text(
    style: Style, text: str, words: str | None, calls: list[tuple[str, str]], size: int
) -> None:
    found, found_calls = parsed(text, style, size=size)

    assert found_calls == calls
    assert found == (text if words is None else words)


@given(st.text(st.sampled_from('<>tol_ca{}"[]:, namerguetsx\n'), max_size=80), st.integers(1, 9))
def test_text_without_a_whole_head_comes_back_as_it_is(text: str, size: int) -> None:
    found, calls = parsed(text, HERMES, size=size)

    if not calls:
        assert found.replace(" ", "").replace("\n", "") == text.replace(" ", "").replace("\n", "")


PIECES = [
    " ",
    "\n",
    "\n\n",
    "words",
    "{",
    "<tool",
    "<tool_call>",
    "</tool_call>",
    HERMES_CALL,
    HERMES_CALL.replace("get", "no"),
]


@given(st.lists(st.sampled_from(PIECES), max_size=7).map("".join), st.integers(1, 40))
def test_a_text_says_the_same_however_it_is_cut(text: str, size: int) -> None:
    assert parsed(text, HERMES, size=size) == parsed(text, HERMES, size=len(text) or 1)


@pytest.mark.slow
@given(
    st.dictionaries(st.text(max_size=5), st.recursive(st.text() | st.integers() | st.none(), st.lists, max_leaves=5))
)
def test_any_arguments_come_as_they_were_written(arguments: dict[str, object]) -> None:
    written = json.dumps(arguments)

    _, calls = parsed(f'<tool_call>\n{{"name": "get", "arguments": {written}}}\n</tool_call>', HERMES, size=3)

    assert calls == [("get", written)]


def test_a_call_cut_within_its_arguments_has_those_that_came() -> None:
    assert parsed('<tool_call>\n{"name": "get", "arguments": {"a": "b', HERMES) == ("", [("get", '{"a": "b')])


def test_half_a_second_call_is_left_out() -> None:
    assert parsed(f"{HERMES_CALL}\n<tool_call>\n{{", HERMES)[0] == ""


def test_a_head_without_end_is_text() -> None:
    text = "<tool_call>" + "x" * (HEAD_CHARS_MAX + 1)

    assert parsed(text, HERMES, size=100) == (text, [])


@pytest.mark.parametrize("size", [1, 4, 100])
@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "rest"),
    [
        ("<think>\nhm\n</think>\n\nyes", False, "hm", "yes"),
        ("hm</think>yes", True, "hm", "yes"),
        ("no thought, <think> here", False, "", "no thought, <think> here"),
        ("<think>never ends", False, "never ends", ""),
        ("<thin", False, "", "<thin"),
        ("\n\nhm\n\nhm\n</think>\n\nyes\n", True, "hm\n\nhm", "yes\n"),
        (" <think></think>\n\n", False, "", ""),
        (" yes", False, "", " yes"),
    ],
)
def test_thoughts_are_parted_from_the_answer(text: str, is_open: bool, reasoning: str, rest: str, size: int) -> None:
    parser = ReasoningParser(is_open=is_open)
    found = [parser.feed(text[start : start + size]) for start in range(0, len(text), size)] + [parser.end()]

    assert "".join(thought for thought, _ in found) == reasoning
    assert "".join(answer for _, answer in found) == rest
    assert not parser.is_thinking or not rest


@pytest.mark.parametrize(
    ("wanted", "template", "tokens", "style"),
    [
        ("", "", set(), HERMES),
        ("", "{{ '<tool_call>' }}", {"<tool_call>"}, HERMES),
        ("", "{{ tools }}", {"<|python_tag|>"}, LLAMA),
        ("", "", {"[TOOL_CALLS]"}, MISTRAL),
        ("", "", {"[TOOL_CALLS]", "[ARGS]"}, MISTRAL_ARGS),
        ("", "[TOOL_CALLS] [", {"[TOOL_CALLS]", "[ARGS]"}, MISTRAL),
        ("", "[TOOL_CALLS]f[ARGS]", {"[TOOL_CALLS]", "[ARGS]"}, MISTRAL_ARGS),
        ("hermes", "", {"[TOOL_CALLS]"}, HERMES),
        ("llama", "", set(), LLAMA),
    ],
)
def test_the_style_is_told_by_template_and_tokens(wanted: str, template: str, tokens: set[str], style: Style) -> None:
    assert style_of(wanted, template=template, tokens=tokens) == style  # type: ignore[arg-type]  # a parameter
