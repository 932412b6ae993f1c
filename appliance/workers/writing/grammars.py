"""What may be written, as llguidance takes it: forms that a client asks for, and function calls of a model's style.

A grammar is checked here, before the engine sees it, so that a bad schema is the client's error and names its field.
llguidance compiles lazily within fixed limits of time and size (`LLParserLimits`), fetches nothing, and reads regular
expressions without backtracking.
"""

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

from llguidance import LLMatcher

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


def grammar_of(
    task: Generate, tools: Sequence[Tool], style: Style, *, cache: GrammarCache, thinks: bool, opens_id: int | None
) -> str:
    """The grammar of a task's answer; "" where anything may be written.

    `thinks`: a text may begin with a thought. `opens_id` is the token of the style's opening mark, where that is a
    special one. Raises InvalidRequest, naming the field at fault.
    """
    form = _form(task)
    if form is not None:
        rule, param = form
        cache.check(_lark(f"start: {rule}"), param=param)
    calls = _calls(task, tools, style, cache=cache) if tools else None
    if form is None and calls is None:
        return ""
    grammar = _lark("\n".join(_rules(task, form[0] if form else "", calls, style, thinks=thinks, opens_id=opens_id)))
    cache.check(grammar, param="tools" if calls else form[1] if form else "")
    return grammar


def _rules(
    task: Generate, form: str, calls: list[str] | None, style: Style, *, thinks: bool, opens_id: int | None
) -> list[str]:
    rules = ["start: thought? answer" if thinks else "start: answer"]
    if thinks:
        rules += [
            f"thought: {json.dumps(THINK_OPENS)} thought_end",
            f"thought_end[lazy]: ANY {json.dumps(THINK_CLOSES)}",
        ]
        rules.append(f"ANY: {_ANY}")
    if calls is None:
        return [*rules, f"answer: {form}"]
    opens = f"<[{opens_id}]>" if opens_id is not None else json.dumps(style.opens) if style.opens else ""
    repeats = task.has_parallel_calls and not task.tool_name
    between = f"{json.dumps(style.between)} " if style.between else ""
    one = f"{opens} call" if opens else "call"
    many = f"{one} ({between}{one})*" if repeats else one
    must_call = task.tool_choice == "required" or bool(task.tool_name)
    if must_call:
        rules.append(f"answer: {many}")
    elif form:
        rules.append(f"answer: {form} | {many}")
    elif not opens:
        # A style whose call is the whole answer: text is what begins otherwise.
        rules += [f"answer: PLAIN? | {many}", r"PLAIN: /[^{](?s:.*)/"]
    else:
        if not thinks:
            rules.append(f"ANY: {_ANY}")
        rules += _auto_calls(style, opens_id, repeats=repeats, between=between, one=one)
    return [*rules, *calls]


def _auto_calls(style: Style, opens_id: int | None, *, repeats: bool, between: str, one: str) -> list[str]:
    """Free text, and calls where the model begins one."""
    if opens_id is not None:
        first = f"ANY <[{opens_id}]> call"
        rules = []
    else:
        first = "opening call"
        rules = [f"opening[lazy]: ANY {json.dumps(style.opens)}"]
    more = f" ({between}{one})*" if repeats else ""
    return [f"answer: ANY | {first}{more}", *rules]


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


def _calls(task: Generate, tools: Sequence[Tool], style: Style, *, cache: GrammarCache) -> list[str] | None:
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
        after = f" {json.dumps(style.after)}" if style.after else ""
        rules.append(f"call_{index}: {json.dumps(before)} {rule}{after}")
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
    return LLMatcher.grammar_from_lark(f"%llguidance {{}}\n{rules}")
