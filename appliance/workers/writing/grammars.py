"""What may be written, as llguidance takes it: forms that a client asks for, and function calls of a model's style.

A grammar is tried here, before the engine sees it, so that a bad one is the client's error and names its field: its
first tokens are computed, which is where most that is too complex shows. llguidance compiles lazily within limits of
size (`LLParserLimits`), fetches nothing, and reads regular expressions without backtracking; what its limits do not
hold for is refused before (`schemas.py`).
"""

import hashlib
import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as RustTokenizer

from appliance.errors import InvalidRequest
from appliance.jobs import Generate
from appliance.workers.writing import schemas
from appliance.workers.writing.call_parser import THINK_CLOSES, THINK_OPENS
from appliance.workers.writing.tool_styles import Style

CACHE_COUNT_MAX: Final = 512
CACHE_BYTES_MAX: Final = 16 * 1024 * 1024
_TRIED_TOKENS: Final = 3
_WORDS_MAX: Final = 300
_PLACE: Final = re.compile(r"at \d+\(\d+\): ")
_ERROR: Final = "error: "
_BLANKS: Final = re.compile("NAME|BARE")  # of a style, see `Style.before`
# As Python's `json.dumps` writes, which is what models were trained on; and no endless white space.
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY: Final = r"/(?s:.*)/"

Tool = dict[str, Any]  # `Any`: JSON
Marks = Mapping[str, int]  # texts that are tokens of their own, and which: llguidance never spells them out
# Whether a text may begin with a thought, or begins within one that its prompt opened.
Thought = Literal["none", "possible", "open"]


class Grammar(NamedTuple):
    """What may be written."""

    rules: str = ""  # "": anything
    field: str = ""  # the client's, that asks for it


class GrammarCache:
    """Remembers which grammars a vocabulary can follow, and what is wrong with others. Bounded; thread-safe."""

    def __init__(
        self, tokens: LLTokenizer, *, count_max: int = CACHE_COUNT_MAX, bytes_max: int = CACHE_BYTES_MAX
    ) -> None:
        self._tokens = tokens
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._bytes = 0
        self._known: OrderedDict[bytes, tuple[int, str]] = OrderedDict()  # by digest: the size, and what is wrong
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._known)

    def check(self, grammar: str, *, param: str) -> None:
        """Raises InvalidRequest with llguidance's words for a grammar that it does not take."""
        data = grammar.encode()
        key = hashlib.sha256(data).digest()
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
        if found is None:
            found = len(data), self._tried(grammar)
            self._keep(key, found)
        if words := found[1]:
            raise InvalidRequest(f"'{param}' cannot be followed: {words}", param=param)

    def _keep(self, key: bytes, found: tuple[int, str]) -> None:
        with self._lock:
            if key in self._known:  # another thread has tried it meanwhile
                return
            self._known[key] = found
            self._bytes += found[0]
            while len(self._known) > self._count_max or self._bytes > self._bytes_max:
                self._bytes -= self._known.popitem(last=False)[1][0]

    def _tried(self, grammar: str) -> str:
        """What is wrong with it; "" for nothing."""
        is_bad, words = LLMatcher.validate_grammar_with_warnings(grammar)
        if is_bad:
            return _in_short(words[0])
        matcher = LLMatcher(self._tokens, grammar, log_level=0)
        for _ in range(_TRIED_TOKENS):
            if matcher.is_error() or matcher.is_stopped():
                break
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if matcher.is_error() or not len(allowed):
                break
            matcher.consume_token(int(allowed[0]))
        return _in_short(matcher.get_error()) if matcher.is_error() else ""


def _in_short(words: object) -> str:
    """The first line, without its place in a grammar that the client has not written; and the error it announces."""
    lines = str(words).strip().splitlines() or ["no details"]
    first = _PLACE.sub("", lines[0])
    error = next((line for line in lines if line.startswith(_ERROR)), "")
    return f"{first} {error.removeprefix(_ERROR)}".strip()[:_WORDS_MAX]


def marks_of(rust: RustTokenizer, tokens: LLTokenizer) -> Marks:
    """Of a vocabulary."""
    added = rust.get_added_tokens_decoder()
    return {token.content: number for number, token in added.items() if tokens.is_special_token(number)}


def grammar_of(
    task: Generate,
    tools: Sequence[Tool],
    style: Style,
    *,
    cache: GrammarCache,
    marks: Marks,
    thought: Thought = "none",
) -> Grammar:
    """The grammar of a task's answer.

    Raises InvalidRequest, naming the field at fault.
    """
    form = _form(task, cache)
    calls = _calls(task, tools, style, cache=cache, marks=marks) if tools else None
    if form is None and calls is None:
        return Grammar()
    rules = [*_start(thought, marks), f"ANY: {_ANY}"]
    rules += [f"answer: {form[0]}"] if calls is None and form else []
    rules += _answer(task, form[0] if form else "", style, marks=marks) if calls is not None else []
    grammar = _lark("\n".join([*rules, *(calls or ())]))
    field = "tools" if calls else form[1] if form else ""
    cache.check(grammar, param=field)
    return Grammar(grammar, field)


def _start(thought: Thought, marks: Marks) -> list[str]:
    """An answer, after what may stand before it; models leave lines between a thought and what follows."""
    if thought == "none":
        return ["start: answer"]
    end = _until("thought_end", THINK_CLOSES, marks)
    lines = '("\\n" "\\n"?)?'
    if thought == "open":
        return [f"start: thought_end {lines} answer", *end]
    return ["start: thought? answer", f"thought: {_literal(THINK_OPENS, marks)} thought_end {lines}", *end]


def _answer(task: Generate, form: str, style: Style, *, marks: Marks) -> list[str]:
    """Calls, and what else there may be."""
    has_more = task.has_parallel_calls and not task.tool_name
    more = f"({_literal(style.between, marks)} call)*" if has_more else ""
    # Of those who write a list, some have a space before it.
    first = f'" "? {_literal(style.first, marks)}' if style.first else ""
    calls = f"calls: {first} call {more} {_literal(style.last, marks)}"
    opened = f"{_literal(style.opens, marks)} calls"
    if task.tool_choice == "required" or task.tool_name:
        return [f"answer: {opened}", calls]
    if form:
        return [f"answer: {form} | {opened}", calls]
    if not style.opens:  # a text may be anything that does not begin as a call does
        begins = re.escape(style.before.partition("NAME")[0])
        return ["answer: PLAIN? | calls", rf"PLAIN: /(?s:.+)/ & ~/{begins}(?s:.*)/", calls]
    return ["answer: ANY | opening calls", *_until("opening", style.opens, marks), calls]


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


def _form(task: Generate, cache: GrammarCache) -> tuple[str, str] | None:
    """The rule of the form that is asked for, and the field that names it."""
    match task.form:
        case "text":
            return None
        case "json_object":
            return _json({"type": "object"}, cache=cache, param="response_format"), "response_format"
        case "json_schema":
            param = "response_format.json_schema.schema"
            schema = _schema(task.pattern)
            schemas.check(schema, len(task.pattern), param)
            return _json(schema, cache=cache, param=param, is_lenient=task.is_lenient), param
        case "regex":
            param = "response_format.pattern"
            expression = task.pattern.decode()
            schemas.check_pattern(expression, param)
            rule = f"/{_slashed(expression)}/"
            cache.check(_lark(f"start: {rule}"), param=param)
            return rule, param


def _calls(
    task: Generate, tools: Sequence[Tool], style: Style, *, cache: GrammarCache, marks: Marks
) -> list[str] | None:
    """Rules of calls, for each function that may be called."""
    if task.tool_choice == "none":
        return None
    rules: list[str] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        if task.tool_name and function["name"] != task.tool_name:
            continue
        param = f"tools[{index}].function.parameters"
        schema = _parameters(function, param)
        rule = _json(schema, cache=cache, param=param, is_lenient=not function.get("strict"))
        before = _BLANKS.sub(partial(_filled, name=function["name"]), style.before)
        rules.append(f"call_{index}: {_literal(before, marks)} {rule} {_literal(style.after, marks)}")
    names = " | ".join(rule.partition(":")[0] for rule in rules)
    return [f"call: {names}", *rules]


def _filled(blank: re.Match[str], *, name: str) -> str:
    return json.dumps(name) if blank[0] == "NAME" else name


def _parameters(function: dict[str, Any], param: str) -> dict[str, Any]:
    """Arguments are an object, whatever else their schema says of them."""
    schema = function.get("parameters") or {"properties": {}}
    kind = schema.get("type", "object")
    if kind not in ("object", ["object"]):
        raise InvalidRequest(f"'{param}.type' is {json.dumps(kind)[:50]}; it must be \"object\"", param=param)
    schemas.check(schema, len(json.dumps(schema)), param)
    return schema if "$ref" in schema else {**schema, "type": "object"}


def _json(schema: dict[str, Any], *, cache: GrammarCache, param: str, is_lenient: bool = False) -> str:
    """The rule of what fits the schema. Raises InvalidRequest for one that cannot be followed.

    `is_lenient`: what cannot be enforced is left out, expressions too.
    """
    schema = schemas.followable(schema, param, is_lenient=is_lenient)
    try:
        return _rule(schema, cache=cache, param=param, is_lenient=is_lenient)
    except InvalidRequest:
        plainer = schemas.without_patterns(schema)
        if not is_lenient or plainer == schema:
            raise
        return _rule(plainer, cache=cache, param=param, is_lenient=True)


def _rule(schema: dict[str, Any], *, cache: GrammarCache, param: str, is_lenient: bool) -> str:
    options = {**_SPACING, **({"lenient": True} if is_lenient else {})}  # and not the client's own
    as_written = "%json " + json.dumps({**schema, "x-guidance": options})
    # Parts that hold together only (allOf) may be anywhere, also behind a reference.
    if '"allOf"' not in as_written:
        closed = "%json " + json.dumps({**schemas.closed(schema), "x-guidance": options})
        try:
            cache.check(_lark(f"start: {closed}"), param=param)
        except InvalidRequest:
            pass  # nothing fits without what it leaves open, or nothing fits at all
        else:
            return closed
    cache.check(_lark(f"start: {as_written}"), param=param)
    return as_written


def _schema(pattern: bytes) -> dict[str, Any]:
    schema = json.loads(pattern)
    assert isinstance(schema, dict), "the gateway lets objects through only"
    return schema


def _slashed(expression: str) -> str:
    """For Lark, which writes expressions between slashes on one line: what ends either is written as an escape."""
    return re.sub(r"\\.|[/\n\r]", lambda found: _ESCAPES.get(found[0][-1], found[0]), expression, flags=re.DOTALL)


_ESCAPES: Final = {"/": "\\/", "\n": "\\n", "\r": "\\r"}


def _lark(rules: str) -> str:
    """In the JSON that any runtime of llguidance takes."""
    return json.dumps({"grammars": [{"lark_grammar": f"%llguidance {{}}\n{rules}"}]})
