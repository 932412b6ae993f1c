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

# Reads [[detector, text], ...], and writes what each text says and calls, read at once. Streamed, the detectors lose
# calls of texts that come in large pieces, and what they give of a call without arguments depends on the pieces.
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
found = []
for name, text in json.load(sys.stdin):
    result = detectors[name]().detect_and_parse(text, tools)
    found.append([result.normal_text, [[call.name, json.loads(call.parameters)] for call in result.calls]])
print("FOUND" + json.dumps(found))
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


@pytest.fixture(scope="module")
def detected(environment: Environment) -> list[tuple[str, Calls]]:
    """What SGLang finds in `texts`."""
    asked = [["mistral" if kind == "args" else kind, text] for kind, text in texts()]
    result = subprocess.run(
        [environment.python, "-c", SCRIPT],
        input=json.dumps(asked),
        env=environment_of("cpu", os.environ, threads=1),
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found = result.stdout.partition("FOUND")[2]
    return [(text, [(name, given) for name, given in calls]) for text, calls in json.loads(found)]


def test_both_find_the_same_calls_and_words(detected: list[tuple[str, Calls]]) -> None:
    chance = random.Random(11)
    for (kind, text), (words, calls) in zip(texts(), detected, strict=True):
        for size in (1, chance.randint(2, 20), len(text)):
            ours, called = parsed(text, STYLES[kind], size=size)
            found = [(name, json.loads(given)) for name, given in called]
            assert (ours.strip(), found) == (words.strip(), calls), (kind, size, text)
