"""What may be written, as llguidance takes it: forms that a client asks for, and function calls of a model's style.

A grammar is checked here, before the engine sees it, so that a bad schema is the client's error and names its field.
llguidance compiles lazily within fixed limits of time and size (`LLParserLimits`), fetches nothing, and reads regular
expressions without backtracking.
"""

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as RustTokenizer

from appliance.errors import InvalidRequest
from appliance.jobs import Generate
from appliance.workers.writing.call_parser import THINK_CLOSES, THINK_OPENS
from appliance.workers.writing.tool_styles import Style

CACHE_COUNT_MAX: Final = 512
CACHE_BYTES_MAX: Final = 16 * 1024 * 1024
_WORDS_MAX: Final = 300
# As Python's `json.dumps` writes, which is what models were trained on; and no endless white space.
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY: Final = r"/(?s:.*)/"

Tool = dict[str, Any]  # `Any`: JSON


class GrammarCache:
    """Remembers which grammars were found good. Bounded; thread-safe."""

    def __init__(self, *, count_max: int = CACHE_COUNT_MAX, bytes_max: int = CACHE_BYTES_MAX) -> None:
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._good: OrderedDict[bytes, int] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._good)

    def check(self, grammar: str, *, param: str) -> None:
        """Raises InvalidRequest with llguidance's words for a grammar that it does not take."""
        data = grammar.encode()
        key = hashlib.sha256(data).digest()
        with self._lock:
            if key in self._good:
                self._good.move_to_end(key)
                return
        is_bad, words = LLMatcher.validate_grammar_with_warnings(grammar)
        if is_bad:
            first = (str(words[0]).strip().splitlines() or ["no details"])[0]
            raise InvalidRequest(f"'{param}' cannot be followed: {first[:_WORDS_MAX]}", param=param)
        with self._lock:
            self._good[key] = len(data)
            self._bytes += len(data)
            while len(self._good) > self._count_max or self._bytes > self._bytes_max:
                self._bytes -= self._good.popitem(last=False)[1]


Marks = Mapping[str, int]  # texts that are tokens of their own, and which: llguidance never spells them out


def marks_of(rust: RustTokenizer) -> Marks:
    """Of a vocabulary. Blocks for a moment."""
    tokens = LLTokenizer(rust.to_str())
    added = rust.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if tokens.is_special_token(number)}


def grammar_of(
    task: Generate, tools: Sequence[Tool], style: Style, *, cache: GrammarCache, thinks: bool, marks: Marks
) -> str:
    """The grammar of a task's answer; "" where anything may be written.

    `thinks`: a text may begin with a thought. Raises InvalidRequest, naming the field at fault.
    """
    form = _form(task)
    if form is not None:
        rule, param = form
        cache.check(_lark(f"start: {rule}"), param=param)
    calls = _calls(task, tools, style, cache=cache, marks=marks) if tools else None
    if form is None and calls is None:
        return ""
    rules = ["start: thought? answer" if thinks else "start: answer", f"ANY: {_ANY}"]
    if thinks:
        rules += _until("thought_end", THINK_CLOSES, marks)
        rules.append(f"thought: {_literal(THINK_OPENS, marks)} thought_end")
    rules += [f"answer: {form[0]}"] if calls is None and form else []
    rules += _answer(task, form[0] if form else "", style, marks=marks) if calls is not None else []
    grammar = _lark("\n".join([*rules, *(calls or ())]))
    cache.check(grammar, param="tools" if calls else form[1] if form else "")
    return grammar


def _answer(task: Generate, form: str, style: Style, *, marks: Marks) -> list[str]:
    """Calls, and what else there may be; `call` is what follows the opening mark of one."""
    one = f"{_literal(style.opens, marks)} call" if style.opens else "call"
    has_more = task.has_parallel_calls and not task.tool_name
    more = f" ({_literal(style.between, marks)} {one})*" if has_more else ""
    if task.tool_choice == "required" or task.tool_name:
        return [f"answer: {one}{more}"]
    if form:
        return [f"answer: {form} | {one}{more}"]
    if not style.opens:  # a call is the whole answer: text is what begins otherwise
        return [f"answer: PLAIN? | {one}{more}", r"PLAIN: /[^{](?s:.*)/"]
    return [f"answer: ANY | opening call{more}", *_until("opening", style.opens, marks)]


def _until(rule: str, mark: str, marks: Marks) -> list[str]:
    """Free text up to a mark, and the mark."""
    if mark in marks:
        return [f"{rule}: ANY {_literal(mark, marks)}"]
    return [f"{rule}[lazy]: ANY {json.dumps(mark)}"]


def _literal(text: str, marks: Marks) -> str:
    """This text and nothing else, in Lark."""
    if not text:
        return ""
    known = sorted((mark for mark in marks if mark in text), key=len, reverse=True)
    pieces = re.split("(" + "|".join(map(re.escape, known)) + ")", text) if known else [text]
    return " ".join(f"<[{marks[piece]}]>" if piece in marks else json.dumps(piece) for piece in pieces if piece)


def _form(task: Generate) -> tuple[str, str] | None:
    """The rule of the form that is asked for, and the field that names it."""
    match task.form:
        case "text":
            return None
        case "json_object":
            return _json({"type": "object"}), "response_format"
        case "json_schema":
            return _json(_schema(task.pattern)), "response_format.json_schema.schema"
        case "regex":
            return f"/{_slashed(task.pattern.decode())}/", "response_format.pattern"


def _calls(
    task: Generate, tools: Sequence[Tool], style: Style, *, cache: GrammarCache, marks: Marks
) -> list[str] | None:
    """Rules of what follows the opening mark of a call, for each function that may be called."""
    if task.tool_choice == "none":
        return None
    rules: list[str] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        if task.tool_name and function["name"] != task.tool_name:
            continue
        schema = function.get("parameters") or {"type": "object", "properties": {}}
        rule = _json(schema, is_lenient=not function.get("strict"))
        cache.check(_lark(f"start: {rule}"), param=f"tools[{index}].function.parameters")
        before = style.before.replace("NAME", json.dumps(function["name"])).replace("BARE", function["name"])
        rules.append(f"call_{index}: {_literal(before, marks)} {rule} {_literal(style.after, marks)}")
    names = " | ".join(rule.partition(":")[0] for rule in rules)
    return [f"call: {names}", *rules]


def _json(schema: dict[str, Any], *, is_lenient: bool = False) -> str:
    own = schema.get("x-guidance")
    options = {**(own if isinstance(own, dict) else {}), **_SPACING, **({"lenient": True} if is_lenient else {})}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _schema(pattern: bytes) -> dict[str, Any]:
    schema = json.loads(pattern)
    assert isinstance(schema, dict), "the gateway lets objects through only"
    return schema


def _slashed(expression: str) -> str:
    """For Lark, which writes expressions between slashes on one line."""
    return expression.replace("/", "\\/").replace("\n", "\\n").replace("\r", "\\r")


def _lark(rules: str) -> str:
    """In the JSON that any runtime of llguidance takes."""
    return json.dumps({"grammars": [{"lark_grammar": f"%llguidance {{}}\n{rules}"}]})
