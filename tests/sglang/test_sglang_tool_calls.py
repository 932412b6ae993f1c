"""Our parser of function calls against SGLang's detectors, which read the same styles."""

import json
import os
import random
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from appliance.workers.engines.sglang.environment import Environment
from appliance.workers.engines.sglang.launch import environment_of
from appliance.workers.writing.tool_styles import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, Style
from tests.unit.test_call_parser import parsed

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

# Reads [[detector, pieces], ...], and writes what each text says and calls: at once where it is one piece, or streamed.
SCRIPT = """
import json, logging, sys
logging.disable(logging.CRITICAL)
from sglang.srt.entrypoints.openai.protocol import Function, Tool
from sglang.srt.function_call.hermes_detector import HermesDetector
from sglang.srt.function_call.llama32_detector import Llama32Detector
from sglang.srt.function_call.mistral_detector import MistralDetector
from sglang.srt.function_call.qwen25_detector import Qwen25Detector
detectors = {"qwen": Qwen25Detector, "hermes": HermesDetector, "llama": Llama32Detector, "mistral": MistralDetector}
tools = [Tool(type="function", function=Function(name=name, parameters={})) for name in ("get", "set_it")]
def whole(detector, text):
    result = detector.detect_and_parse(text, tools)
    return [result.normal_text, [[call.name, call.parameters] for call in result.calls]]
def streamed(detector, pieces):
    text, calls = "", {}
    for piece in [*pieces, "", "", ""]:  # what a piece finishes is told by the next ones
        result = detector.parse_streaming_increment(piece, tools)
        text += result.normal_text
        for call in result.calls:
            found = calls.setdefault(call.tool_index, ["", ""])
            found[0] += call.name or ""
            found[1] += call.parameters
    return [text, list(calls.values())]
print("FOUND" + json.dumps([
    whole(detectors[kind](), *pieces) if len(pieces) == 1 else streamed(detectors[kind](), pieces)
    for kind, pieces in json.load(sys.stdin)
]))
"""
STYLES: dict[str, Style] = {"qwen": HERMES, "hermes": HERMES, "llama": LLAMA, "mistral": MISTRAL, "args": MISTRAL_ARGS}
STRINGS = [
    "",
    "a}b{",
    '"',
    "\\",
    '\\"}',
    "[]",
    "line\nbreak",
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]{}",
    "; ",
    "né 🦜",
    "\u2028",
]
FOOLED_BY = {"hermes": ("<tool_call>", "</tool_call>")}

Calls = list[tuple[str, dict[str, Any]]]  # `Any`: JSON


def value(chance: random.Random, strings: list[str], *, depth: int = 3) -> Any:  # `Any`: JSON
    kinds: list[Any] = [None, True, chance.randint(-9, 9), -1.5e-7, chance.choice(strings)]
    if depth:
        kinds += [
            [value(chance, strings, depth=depth - 1) for _ in range(chance.randint(0, 3))],
            {chance.choice(strings): value(chance, strings, depth=depth - 1) for _ in range(chance.randint(0, 3))},
        ]
    return chance.choice(kinds)


def arguments(chance: random.Random, kind: str) -> dict[str, Any]:
    # A mark within a string is data; to SGLang's detectors of these kinds it is the mark all the same.
    strings = [each for each in STRINGS if not any(mark in each for mark in FOOLED_BY.get(kind, ()))]
    return {chance.choice(strings) or "a": value(chance, strings) for _ in range(chance.randint(0, 4))}


def written(kind: str, calls: Calls) -> str:
    """As models of this kind write it."""
    bodies = [(name, json.dumps(given, ensure_ascii=False)) for name, given in calls]
    match kind:
        case "qwen" | "hermes":
            blocks = (
                f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in bodies
            )
            return "\n".join(blocks)
        case "llama":
            return "; ".join(f'{{"name": "{name}", "parameters": {given}}}' for name, given in bodies)
        case "mistral":
            listed = ", ".join(f'{{"name": "{name}", "arguments": {given}}}' for name, given in bodies)
            return f"[TOOL_CALLS] [{listed}]"
        case _:
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{given}" for name, given in bodies)


def texts() -> Iterator[tuple[str, str]]:
    """Of each kind: words alone, calls alone, and calls behind words where there may be some."""
    chance = random.Random(7)
    for kind in STYLES:
        yield kind, "No call, but {} and [1] and <b>."
        for _ in range(60):
            calls = [(chance.choice(["get", "set_it"]), arguments(chance, kind)) for _ in range(chance.randint(1, 3))]
            words = "" if kind == "llama" else chance.choice(["", "I look.", "Both é and {}."])
            yield kind, words + written(kind, calls)


HERMES_CALL = '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
HERMES_OTHER = HERMES_CALL.replace("get", "other")
LLAMA_CALL = '{"name": "get", "parameters": {"a": 1}}'
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "get", "arguments": {"a": 1}}]'
ONCE: list[tuple[str, Any]] = [("get", {"a": 1})]

# Texts that both read alike, by hand; the calls in them.
ALIKE: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("hermes", HERMES_CALL.replace("1", '"\\\\\\"}"'), [("get", {"a": '\\"}'})]),
    ("hermes", HERMES_CALL.replace("1", '{"b": "}{", "c": [[], {}]}'), [("get", {"a": {"b": "}{", "c": [[], {}]}})]),
    ("hermes", HERMES_CALL.replace('"a"', '"\\ud83e\\udd9c é"'), [("get", {"🦜 é": 1})]),
    ("hermes", HERMES_CALL.replace("\n", "").replace(": ", ":"), ONCE),
    ("hermes", HERMES_CALL.replace("arguments", "parameters"), ONCE),
    ("hermes", HERMES_CALL.replace('{"a": 1}', '"text"'), [("get", "text")]),
    ("hermes", HERMES_CALL.replace('{"a": 1}', "[1]"), [("get", [1])]),
    ("hermes", f"Well.\n\n{HERMES_CALL}\n{HERMES_CALL}", ONCE * 2),
    ("hermes", "A <tool_call", []),
    ("llama", LLAMA_CALL.replace("parameters", "arguments"), ONCE),
    ("llama", '{"type": "function", ' + LLAMA_CALL[1:], ONCE),
    ("llama", f"{LLAMA_CALL};{LLAMA_CALL}", ONCE * 2),
    ("llama", f"{LLAMA_CALL}\n{LLAMA_CALL}", ONCE * 2),
    ("llama", f"{LLAMA_CALL} That is all.", ONCE),
    ("llama", f"No call: {LLAMA_CALL}", []),
    ("mistral", MISTRAL_CALL.replace("1", '["]", "}"]'), [("get", {"a": ["]", "}"]})]),
    ("mistral", f"{MISTRAL_CALL} That is all.", ONCE),
    ("args", '[TOOL_CALLS] get[ARGS] {"a": 1}', ONCE),
    ("args", '[TOOL_CALLS]get[ARGS]{"a": 1} That is all.', ONCE),
]

Read = tuple[str, list[tuple[str, str]]]  # the words, and of each call its name and its arguments as they are written
GET = [("get", '{"a": 1}')]

# Texts that SGLang's detectors read otherwise: why, what they find, and what we do.
UNLIKE: list[tuple[str, str, str, Read, Read]] = [
    ("words after a call are lost there", "hermes", f"{HERMES_CALL}\nAll.", ("", GET), ("All.", GET)),
    (
        "words between calls are lost there",
        "hermes",
        f"{HERMES_CALL}\nAnd\n{HERMES_CALL}",
        ("", GET * 2),
        ("And\n", GET * 2),
    ),
    (
        "a function that is not there is left out there; to us it is text: nothing is lost",
        "hermes",
        HERMES_OTHER,
        ("", []),
        (HERMES_OTHER, []),
    ),
    (
        "the same beside a call",
        "hermes",
        f"{HERMES_CALL}\n{HERMES_OTHER}",
        ("", GET),
        (HERMES_OTHER, GET),
    ),
    (
        "an answer that does not begin with a call of ours is all text to us",
        "llama",
        f"{LLAMA_CALL.replace('get', 'other')}; {LLAMA_CALL}",
        ("", GET),
        (f"{LLAMA_CALL.replace('get', 'other')}; {LLAMA_CALL}", []),
    ),
    (
        "an object that is no call is lost there",
        "llama",
        '{"a": 1}',
        ("", []),
        ('{"a": 1}', []),
    ),
    (
        "white space before a call hides it there",
        "llama",
        f"\n{LLAMA_CALL}",
        (f"\n{LLAMA_CALL}", []),
        ("", GET),
    ),
    (
        "a list right behind its mark, as the model's own template writes it, is none there",
        "mistral",
        MISTRAL_CALL.replace("] [", "]["),
        ("", []),
        ("", GET),
    ),
    (
        "what is cut or broken takes everything along there; we have begun to stream, and give on what was written",
        "hermes",
        HERMES_CALL.replace("1", "tru"),
        (HERMES_CALL.replace("1", "tru"), []),
        ("", [("get", '{"a": tru}')]),
    ),
    (
        "the same of Mistral's list",
        "mistral",
        MISTRAL_CALL[:-3],
        ("", []),
        ("", [("get", '{"a": 1')]),
    ),
    (
        "a brace too many takes everything along there; the value has ended before it",
        "hermes",
        HERMES_CALL.replace("}}", "}}}"),
        (HERMES_CALL.replace("}}", "}}}"), []),
        ("", GET),
    ),
    # These need a look behind the arguments before a call can be announced, and our grammars allow none of them.
    (
        "arguments before their name are a call there",
        "hermes",
        '<tool_call>\n{"arguments": {"a": 1}, "name": "get"}\n</tool_call>',
        ("", GET),
        ('<tool_call>\n{"arguments": {"a": 1}, "name": "get"}\n</tool_call>', []),
    ),
    (
        "a call without arguments is one there",
        "hermes",
        '<tool_call>\n{"name": "get"}\n</tool_call>',
        ("", [("get", "{}")]),
        ('<tool_call>\n{"name": "get"}\n</tool_call>', []),
    ),
    (
        "a list within the marks is read there",
        "hermes",
        f"<tool_call>\n[{HERMES_CALL.split(chr(10))[1]}]\n</tool_call>",
        ("", GET),
        (f"<tool_call>\n[{HERMES_CALL.split(chr(10))[1]}]\n</tool_call>", []),
    ),
    (
        "Python's quotes are read there",
        "llama",
        LLAMA_CALL.replace('"', "'"),
        ("", GET),
        (LLAMA_CALL.replace('"', "'"), []),
    ),
]


def cut(text: str, chance: random.Random, *, size_max: int) -> list[str]:
    """Two pieces or more."""
    pieces: list[str] = [""]
    while text:
        size = chance.randint(1, size_max)
        pieces.append(text[:size])
        text = text[size:]
    return pieces


def streamed_texts() -> Iterator[tuple[str, str, list[str]]]:
    """Those that SGLang's detectors can be streamed, in pieces of the size of tokens.

    Of Mistral's lists they give on all after the first call as text, and take an [ARGS] within a string for the mark.
    Qwen's loses words that come in one piece with a mark: its words come by letters.
    """
    chance = random.Random(13)
    for kind, text in texts():
        if kind != "mistral" or ("[ARGS]" not in text and text.count('"name"') <= 1):
            yield kind, text, cut(text, chance, size_max=1 if kind == "qwen" else 6)


@pytest.fixture(scope="module")
def detected(environment: Environment) -> Iterator[Read]:
    """What SGLang finds in `texts`, in `streamed_texts`, and in those by hand, one after the other."""
    asked = [(kind, [text]) for kind, text in texts()]
    asked += [(kind, pieces) for kind, _, pieces in streamed_texts()]
    asked += [(kind, [text]) for kind, text, _ in ALIKE]
    asked += [(kind, [text]) for _, kind, text, _, _ in UNLIKE]
    result = subprocess.run(
        [environment.python, "-c", SCRIPT],
        input=json.dumps([["mistral" if kind == "args" else kind, pieces] for kind, pieces in asked]),
        env=environment_of("cpu", os.environ, threads=1),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout.partition("FOUND")[2])
    assert len(found) == len(asked)
    return iter([(text, [(name, arguments) for name, arguments in calls]) for text, calls in found])


def values(calls: list[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(written)) for name, written in calls]


def test_both_read_the_same(detected: Iterator[Read]) -> None:
    """One test for all, as SGLang's imports take a while."""
    chance = random.Random(11)
    for kind, text in texts():
        words, calls = next(detected)
        for size in (1, chance.randint(2, 20), len(text)):
            ours, called = parsed(text, STYLES[kind], size=size)
            assert (ours.strip(), values(called)) == (words.strip(), values(calls)), (kind, size, text)

    for kind, text, pieces in streamed_texts():
        words, calls = next(detected)
        ours, called = parsed(text, STYLES[kind], size=chance.randint(1, 20))
        assert values(called) == values(calls), (kind, pieces)
        # They take their closing marks, "]" and such, out of words that hold no call.
        assert ours.replace("]", "").strip() == words.replace("]", "").strip(), (kind, pieces)

    for kind, text, expected in ALIKE:
        words, calls = next(detected)
        assert values(calls) == expected, (kind, text)
        for size in (1, 3, len(text)):
            ours, called = parsed(text, STYLES[kind], size=size)
            assert (ours.strip(), values(called)) == (words.strip(), expected), (kind, size, text)

    for reason, kind, text, theirs, our in UNLIKE:
        assert next(detected) == theirs, reason
        for size in (1, 3, len(text)):
            assert parsed(text, STYLES[kind], size=size) == our, reason
