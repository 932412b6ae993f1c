"""What may be written, as llguidance takes it: forms that a client asks for, and function calls of a model's style.

A grammar is tried here, before the engine sees it, so that a bad one is the client's error and names its field: its
first tokens are computed, which is where most that is too complex shows. llguidance compiles lazily within fixed limits
of time and size (`LLParserLimits`), fetches nothing, and reads regular expressions without backtracking.
"""

import hashlib
import json
import math
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from decimal import Decimal
from functools import partial
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer as RustTokenizer

from appliance.errors import InvalidRequest
from appliance.jobs import Generate
from appliance.workers.writing.call_parser import THINK_CLOSES, THINK_OPENS
from appliance.workers.writing.tool_styles import Style

CACHE_COUNT_MAX: Final = 512
CACHE_BYTES_MAX: Final = 16 * 1024 * 1024
SCHEMA_BYTES_MAX: Final = 256 * 1024
# Of one regular expression. Longer ones can take seconds and gigabytes before llguidance's own limits stop them:
# measured with ten thousand of ".*", whose every token took a second.
PATTERN_CHARS_MAX: Final = 2048
# llguidance makes a state of each remainder of a `multipleOf`, and of each combination of several, before any limit of
# its own is looked at: measured with 999,983, which took 14 s and 350 MB.
REMAINDERS_MAX: Final = 10_000
# Of expressions that may have to hold together, whose automaton is the product of theirs: 29 of ten characters took
# gigabytes and never ended.
JOINED_CHARS_MAX: Final = 60
# Of one expression, with what is repeated written out: a count within a count takes seconds to be refused.
PATTERN_SIZE_MAX: Final = 20_000
# Of one object. Each may be the next, and llguidance follows no more possibilities; of some thousands it takes ten
# seconds to say so.
OPTIONAL_MAX: Final = 499
# Bounds of a number take some milliseconds to compile: what has more of them is followed as it was written.
_BOUNDED_NUMBERS_MAX: Final = 100
_TRIED_TOKENS: Final = 3
_WORDS_MAX: Final = 300
_PLACE: Final = re.compile(r"at \d+\(\d+\): ")
_ERROR: Final = "error: "
_PIECES: Final = re.compile(
    r"\\.|\[(?:\\.|[^\]\\])*\]|\{(?:\d*,)?(?P<count>\d+)\}|\{(?P<least>\d+),\}|.", re.DOTALL
)  # of an expression: an escape, a set, a count, a character
_BLANKS: Final = re.compile("NAME|BARE")  # of a style, see `Style.before`
# As Python's `json.dumps` writes, which is what models were trained on; and no endless white space.
_SPACING: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# Of fifteen digits, which every reader of JSON takes exactly; llguidance counts no finer than the step.
_NUMBER_MAX: Final = 10**15 - 1
_NUMBER_STEP: Final = 1e-9
_OPEN_BY_MEANING: Final = (
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "minProperties",
    "anyOf",
    "oneOf",
    "$ref",
)
_VALUES: Final = ("const", "default", "enum", "examples")  # of a schema, and no schemas
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
            schema = _bounded(_schema(task.pattern), len(task.pattern), param)
            return _json(schema, cache=cache, param=param, is_lenient=task.is_lenient), param
        case "regex":
            param = "response_format.pattern"
            expression = task.pattern.decode()
            _check_pattern(expression, param)
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
    schema = _bounded(schema, len(json.dumps(schema)), param)
    return schema if "$ref" in schema else {**schema, "type": "object"}


def _bounded(schema: dict[str, Any], size: int, param: str) -> dict[str, Any]:
    """The schema. Raises InvalidRequest for one that is too long, or has too long an expression."""
    if size > SCHEMA_BYTES_MAX:
        raise InvalidRequest(f"'{param}' has {size} bytes, the limit is {SCHEMA_BYTES_MAX}", param=param)
    row: list[Any] = [schema]
    while row:
        one = row.pop()
        if isinstance(one, list):
            row += one
        elif isinstance(one, dict):
            row += one.values()
            by_name = one.get("patternProperties")
            for pattern in [one.get("pattern"), *(by_name if isinstance(by_name, dict) else ())]:
                if isinstance(pattern, str):
                    _check_pattern(pattern, param)
            _check_optional(one, param)
    return schema


def _check_optional(schema: dict[str, Any], param: str) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict) and len(properties) > OPTIONAL_MAX:
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        optional = sum(name not in names for name in properties)
        if optional > OPTIONAL_MAX:
            raise InvalidRequest(
                f"'{param}' has an object of {optional} properties that are not required, the limit is {OPTIONAL_MAX}",
                param=param,
            )


def _check_pattern(expression: str, param: str) -> None:
    if len(expression) > PATTERN_CHARS_MAX:
        raise InvalidRequest(
            f"'{param}' has an expression of {len(expression)} characters, the limit is {PATTERN_CHARS_MAX}",
            param=param,
        )
    if _size(expression) > PATTERN_SIZE_MAX:
        raise InvalidRequest(
            f"'{param}' has an expression that repeats what is repeated, to more than {PATTERN_SIZE_MAX} characters",
            param=param,
        )


def _size(expression: str) -> int:
    """About how many characters it has with its counts written out."""
    sums, last = [0], 0  # of the open groups; of what a count would repeat
    for found in _PIECES.finditer(expression):
        piece = found[0]
        if piece == "(":
            sums.append(0)
            last = 0
        elif piece == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif count := found["count"] or found["least"]:
            sums[-1] += last * (min(int(count), PATTERN_SIZE_MAX + 1) - 1)
            last *= min(int(count), PATTERN_SIZE_MAX + 1)
        else:
            last = 1
            sums[-1] += 1
    return sum(sums)


def _json(schema: dict[str, Any], *, cache: GrammarCache, param: str, is_lenient: bool = False) -> str:
    """The rule of what fits the schema. Raises InvalidRequest for one that cannot be followed.

    `is_lenient`: what cannot be enforced is left out, expressions too.
    """
    schema = _spared(schema)
    if _has_joined(schema):
        if not is_lenient:
            raise InvalidRequest(
                f"'{param}' has expressions that have to hold together ('allOf', or beside a '$ref'), of more than "
                f"{JOINED_CHARS_MAX} characters",
                param=param,
            )
        schema = _spared(schema, has_patterns=False)
    if _remainders(schema) > REMAINDERS_MAX:
        if not is_lenient:
            raise InvalidRequest(
                f"'{param}' has a 'multipleOf' that cannot be followed, or several: their digits multiply to more than "
                f"{REMAINDERS_MAX}",
                param=param,
            )
        schema = _spared(schema, has_steps=False)
    if not is_lenient:
        return _rule(schema, cache=cache, param=param)
    try:
        return _rule(schema, cache=cache, param=param, is_lenient=True)
    except InvalidRequest:
        plainer = _spared(schema, has_patterns=False)
        if plainer == schema:
            raise
        return _rule(plainer, cache=cache, param=param, is_lenient=True)


def _spared(value: Any, *, has_patterns: bool = True, has_steps: bool = True) -> Any:  # `Any`: JSON
    """A schema without what says nothing: that names are texts.

    Without `has_patterns`, also without expressions; without `has_steps`, without `multipleOf`.
    """
    if isinstance(value, list):
        return [_spared(each, has_patterns=has_patterns, has_steps=has_steps) for each in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, inner in value.items():
        says_nothing = name == "propertyNames" and inner in (True, {}, {"type": "string"})
        # A property may have these names too: of it there is a schema.
        is_pattern = name == "patternProperties" or (name == "pattern" and isinstance(inner, str))
        is_step = name == "multipleOf" and isinstance(inner, int | float)
        if not says_nothing and (has_patterns or not is_pattern) and (has_steps or not is_step):
            kept = name in _VALUES
            found[name] = inner if kept else _spared(inner, has_patterns=has_patterns, has_steps=has_steps)
    return found


def _has_joined(schema: dict[str, Any]) -> bool:
    """Whether expressions may have to hold together that are longer than can be followed so."""
    row: list[Any] = [schema]
    chars, may_join = 0, False
    while row:
        one = row.pop()
        if isinstance(one, list):
            row += one
        elif isinstance(one, dict):
            row += one.values()
            by_name = one.get("patternProperties")
            names = list(by_name) if isinstance(by_name, dict) else []
            own = [pattern] if isinstance(pattern := one.get("pattern"), str) else []
            chars += sum(map(len, [*names, *own]))
            beside = bool(own) and any(name in one for name in ("$ref", "anyOf", "oneOf", "format"))
            may_join = may_join or beside or "allOf" in one or len(names) > 1
    return may_join and chars > JOINED_CHARS_MAX


def _remainders(schema: dict[str, Any]) -> int:
    """How many remainders have to be told apart at once, where all multiples that the schema names come together."""
    steps: set[int] = set()
    row: list[Any] = [schema]
    while row:
        one = row.pop()
        if isinstance(one, list):
            row += one
        elif isinstance(one, dict):
            row += one.values()
            step = one.get("multipleOf")
            if isinstance(step, int | float) and math.isfinite(step) and step:
                steps.add(_digits(step))
    return math.prod(steps)


def _digits(number: float) -> int:
    """Of a number, without its point and the zeros at its ends: 25 of 0.250 and of 2500."""
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits)))


def _rule(schema: dict[str, Any], *, cache: GrammarCache, param: str, is_lenient: bool = False) -> str:
    options = {**_SPACING, **({"lenient": True} if is_lenient else {})}  # and not the client's own
    as_written = "%json " + json.dumps({**schema, "x-guidance": options})
    # Parts that hold together only (allOf) may be anywhere, also behind a reference.
    if '"allOf"' not in as_written:
        has_ends = as_written.count('"number"') + as_written.count('"integer"') <= _BOUNDED_NUMBERS_MAX
        closed = "%json " + json.dumps({**_closed(schema, has_ends=has_ends), "x-guidance": options})
        try:
            cache.check(_lark(f"start: {closed}"), param=param)
        except InvalidRequest:
            pass  # nothing fits without what it leaves open, or nothing fits at all
        else:
            return closed
    cache.check(_lark(f"start: {as_written}"), param=param)
    return as_written


def _closed(schema: Any, *, has_ends: bool) -> Any:  # `Any`: JSON
    """The schema, where objects have no other properties than those they list; with `has_ends`, numbers an end.

    What a schema leaves open, a small model fills with whatever comes to it, to the limit of its tokens. What is
    written fits the client's own schema all the same.
    """
    if not isinstance(schema, dict):
        return schema
    found = {**schema, **(_ends(schema) if has_ends else {})}
    for name in ("properties", "$defs", "definitions"):
        if isinstance(inner := schema.get(name), dict):
            found[name] = {key: _closed(value, has_ends=has_ends) for key, value in inner.items()}
    if "items" in schema:
        found["items"] = _closed(schema["items"], has_ends=has_ends)
    # One of several, and nothing beside them: what one of them leaves open, none of the others says.
    if isinstance(several := schema.get("anyOf"), list) and "properties" not in schema:
        found["anyOf"] = [_closed(each, has_ends=has_ends) for each in several]
    is_plain = not any(name in schema for name in _OPEN_BY_MEANING)
    if schema.get("properties") and is_plain:
        found["additionalProperties"] = False
    return found


def _ends(schema: dict[str, Any]) -> dict[str, Any]:
    """Bounds of a number, where its schema has none: without, it may have digits to the end of the text."""
    kind = schema.get("type")
    kinds = kind if isinstance(kind, list) else [kind]
    if not ("integer" in kinds or "number" in kinds) or "enum" in schema or "const" in schema:
        return {}
    lows = [schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema]
    highs = [schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema]
    if not all(isinstance(bound, int | float) and abs(bound) < _NUMBER_MAX for bound in (*lows, *highs)):
        return {}
    found: dict[str, Any] = {}
    if not lows:
        found["minimum"] = -_NUMBER_MAX
    if not highs:
        found["maximum"] = _NUMBER_MAX
    if "number" in kinds and "multipleOf" not in schema:
        found["multipleOf"] = _NUMBER_STEP
    return found


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
