"""What may be written: forms and function calls, as llguidance enforces them; and what it refuses."""

import json
import random
import re
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from appliance.errors import InvalidRequest
from appliance.jobs import Generate
from appliance.workers.writing.call_parser import CallParser
from appliance.workers.writing.grammars import GrammarCache, grammar_of, marks_of
from appliance.workers.writing.schemas import OPTIONAL_MAX, SCHEMA_BYTES_MAX
from appliance.workers.writing.tool_styles import HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, Style
from tests.unit.test_text_stream import RUST, mark

TOKENS = LLTokenizer(RUST.to_str(), eos_token=mark("<|end|>"))
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "get", "parameters": CITY}},
    {"type": "function", "function": {"name": "now"}},
]
MARK = mark("[CALLS]")
END = mark("<|end|>")
BAD = json.dumps({"grammars": [{"lark_grammar": "start: /[/"}]})


def grammar(task: Generate, tools: list[dict[str, Any]] | None = None, style: Style = HERMES, **options: Any) -> str:
    settings: dict[str, Any] = {"cache": GrammarCache(TOKENS), "marks": marks_of(RUST, TOKENS)} | options
    return grammar_of(task, tools or [], style, **settings).rules


def accepts(grammar: str, *pieces: str | int) -> bool:
    """Whether a text may be written and end there; numbers are special tokens."""
    matcher = LLMatcher(TOKENS, grammar, log_level=0)
    ids = [
        token
        for piece in pieces
        for token in ([piece] if isinstance(piece, int) else RUST.encode(piece, add_special_tokens=False).ids)
    ]
    return all(matcher.consume_token(token) for token in ids) and bool(matcher.is_accepting())


def schema_task(schema: object) -> Generate:
    return Generate(form="json_schema", pattern=json.dumps(schema).encode())


def test_free_text_has_no_grammar() -> None:
    assert grammar(Generate()) == ""
    assert grammar(Generate(tool_choice="none"), TOOLS) == ""


def test_forms_are_enforced() -> None:
    an_object = grammar(Generate(form="json_object"))
    assert accepts(an_object, '{"a": [1, "x", null]}')
    assert not accepts(an_object, "[1]")
    city = grammar(schema_task(CITY))
    assert accepts(city, '{"city": "Köln"}')
    assert not accepts(city, '{"town": "x"}')
    assert not accepts(city, '{\n"city": "x"}'), "white space is as json.dumps writes it"
    choice = grammar(Generate(form="regex", pattern=rb"(yes|no)/[0-9]{2}"))
    assert accepts(choice, "yes/42")
    assert not accepts(choice, "maybe")


def test_objects_have_the_properties_that_they_list_and_no_others() -> None:
    open_city = {"type": "object", "properties": {"city": {"type": "string"}}}
    found = grammar(schema_task({"type": "array", "items": open_city}))
    assert accepts(found, '[{"city": "Rome"}]')
    assert not accepts(found, '[{"city": "Rome", "more": 1}]')
    assert accepts(grammar(schema_task({**open_city, "additionalProperties": True})), '{"city": "Rome", "more": 1}')
    people = {"type": "object", "properties": {"people": {"type": "integer"}}}
    combined = {"allOf": [{"$ref": "#/$defs/city"}, people], "$defs": {"city": open_city}}
    assert accepts(grammar(schema_task(combined)), '{"city": "Rome", "people": 3}')


CALL = {
    "hermes": '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>',
    "llama": '{"name": "get", "parameters": {"city": "Rome"}}',
    "mistral": '[TOOL_CALLS][{"name": "get", "arguments": {"city": "Rome"}}]',
    "args": '[TOOL_CALLS]get[ARGS]{"city": "Rome"}',
}
STYLES = [(HERMES, CALL["hermes"]), (LLAMA, CALL["llama"]), (MISTRAL, CALL["mistral"]), (MISTRAL_ARGS, CALL["args"])]


@pytest.mark.parametrize(("style", "call"), STYLES)
def test_calls_are_allowed_required_or_named(style: Style, call: str) -> None:
    auto = grammar(Generate(), TOOLS, style)
    assert accepts(auto, "It is sunny.")
    assert accepts(auto, call)
    assert not accepts(auto, call.replace("city", "town"))
    required = grammar(Generate(tool_choice="required"), TOOLS, style)
    assert accepts(required, call)
    assert not accepts(required, "It is sunny.")
    named = grammar(Generate(tool_choice="required", tool_name="now"), TOOLS, style)
    assert accepts(named, call.replace("get", "now").replace('{"city": "Rome"}', "{}"))
    assert not accepts(named, call)


@pytest.mark.parametrize(("style", "call"), STYLES)
def test_several_calls_where_they_may_be(style: Style, call: str) -> None:
    first = call.removesuffix(style.last)
    two = first + style.between + call.removeprefix(style.opens + style.first)

    assert accepts(grammar(Generate(tool_choice="required"), TOOLS, style), two)
    assert not accepts(grammar(Generate(tool_choice="required", has_parallel_calls=False), TOOLS, style), two)
    assert not accepts(grammar(Generate(tool_choice="required", tool_name="get"), TOOLS, style), two)


def written(grammar: str, seed: int) -> str:
    """Some text that a grammar allows, to its end; what it may leave out it leaves out half of the time."""
    chance = random.Random(seed)
    matcher = LLMatcher(TOKENS, grammar, log_level=0)
    ids: list[int] = []
    while not matcher.is_stopped():
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(TOKENS.vocab_size) if mask[token // 8] >> (token % 8) & 1]
        token = END if END in allowed and chance.random() < 0.5 else chance.choice(allowed)
        assert matcher.consume_token(token)
        ids.append(token)
    return str(RUST.decode([token for token in ids if token != END]))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("style", [HERMES, LLAMA, MISTRAL, MISTRAL_ARGS])
def test_what_a_grammar_allows_is_what_the_parser_reads(style: Style, seed: int) -> None:
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": ['}"]</tool_call>', 1.5, None, [{}]]}, "b": {"type": "boolean"}},
        "required": ["a"],
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("get", "get_2")]
    text = written(grammar(Generate(tool_choice="required"), tools, style), seed)
    parser = CallParser(style, ["get", "get_2"])

    said = [piece for letter in text for piece in parser.feed(letter)] + parser.end()

    assert "".join(piece.text for piece in said) == ""
    calls = [piece.call for piece in said if piece.call is not None]
    assert [call.name for call in calls if call.name] == re.findall(r"get_2|get", text)
    for index in range(parser.calls):
        arguments = json.loads("".join(call.arguments for call in calls if call.index == index))
        assert arguments["a"] in ('}"]</tool_call>', 1.5, None, [{}])
        assert arguments.keys() <= {"a", "b"}


@pytest.mark.parametrize("name", ["BAREMETAL_list", "NAME", "get_NAME_BARE"])
@pytest.mark.parametrize(("style", "call"), STYLES)
def test_a_function_may_have_any_name(style: Style, call: str, name: str) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": CITY}}]

    found = grammar(Generate(tool_choice="required"), tools, style)

    assert accepts(found, call.replace("get", name))


def test_text_may_come_before_a_call_and_none_that_is_bad_after_its_mark() -> None:
    auto = grammar(Generate(), TOOLS)

    assert accepts(auto, f"Let me see.\n{CALL['hermes']}")
    assert not accepts(auto, "Let me see.<tool_call> or not")


def test_a_special_token_opens_a_call_where_the_vocabulary_has_one() -> None:
    style = MISTRAL._replace(opens="[CALLS]")
    body = '[{"name": "get", "arguments": {"city": "Rome"}}]'

    auto = grammar(Generate(), TOOLS, style)

    assert accepts(auto, "Well.", MARK, body)
    assert accepts(auto, MARK, body)
    assert not accepts(auto, MARK, "[]")
    assert accepts(grammar(Generate(tool_choice="required"), TOOLS, style), MARK, body)


def test_a_form_and_functions_go_together() -> None:
    both = grammar(schema_task(CITY), TOOLS)

    assert accepts(both, '{"city": "Rome"}')
    assert accepts(both, CALL["hermes"])
    assert not accepts(both, "It is sunny.")


def test_a_thought_may_come_first() -> None:
    city = grammar(schema_task(CITY), thought="possible")

    assert accepts(city, '{"city": "Rome"}')
    assert accepts(city, mark("<think>"), 'hm, {"a"}</think>{"city": "Rome"}')
    assert accepts(city, mark("<think>"), '\nhm\n</think>\n\n{"city": "Rome"}')
    assert not accepts(city, mark("<think>"), 'hm</think>{"town": "Rome"}')
    assert accepts(grammar(Generate(), TOOLS, thought="possible"), "free text")


def test_a_thought_that_the_prompt_opened_ends_before_the_answer() -> None:
    city = grammar(schema_task(CITY), thought="open")

    assert accepts(city, 'hm</think>\n{"city": "Rome"}')
    assert not accepts(city, '{"city": "Rome"}')
    assert not accepts(city, 'hm</think>{"town": "Rome"}')
    assert accepts(grammar(Generate(), TOOLS, thought="open"), "hm</think>free text")
    assert not accepts(grammar(Generate(tool_choice="required"), TOOLS, thought="open"), "hm</think>free text")


def test_a_text_may_begin_like_json_where_calls_are_nothing_else() -> None:
    auto = grammar(Generate(), TOOLS, LLAMA)

    assert accepts(auto, '{"answer": 42}')
    assert accepts(auto, "")
    assert not accepts(auto, '{"name": "other", "parameters": {}}')


@pytest.mark.parametrize(
    ("expression", "text"),
    [(r"a\/b", "a/b"), ("a/b", "a/b"), (r"a\\/b", "a\\/b"), ("a\nb", "a\nb"), ("a\\\nb", "a\nb"), (r"\d\.", "1.")],
)
def test_an_expression_is_read_as_it_is_written(expression: str, text: str) -> None:
    assert accepts(grammar(Generate(form="regex", pattern=expression.encode())), text)


@pytest.mark.parametrize("expression", [r"a\/ | /b", "a/ | /b", 'a/\nstart: "b"', "a\\"])
def test_an_expression_cannot_end_its_rule(expression: str) -> None:
    try:
        found = grammar(Generate(form="regex", pattern=expression.encode()))
    except InvalidRequest:
        return
    assert not accepts(found, "b")


@pytest.mark.parametrize(
    "parameters",
    [{}, None, {"type": ["object"]}, {"$ref": "#/$defs/a", "$defs": {"a": {"type": "object"}}}, {"anyOf": [{}]}],
)
def test_arguments_are_an_object_whatever_else_is_said(parameters: object) -> None:
    tool = {"type": "function", "function": {"name": "get", "parameters": parameters}}
    found = grammar(Generate(tool_choice="required"), [tool])

    assert accepts(found, CALL["hermes"])
    assert not accepts(found, CALL["hermes"].replace('{"city": "Rome"}', '"Rome"'))


@pytest.mark.parametrize(
    ("task", "tools", "param"),
    [
        (schema_task({"type": "strin"}), [], "response_format.json_schema.schema"),
        (schema_task({"$ref": "https://example.com/schema.json"}), [], "response_format.json_schema.schema"),
        (schema_task({"type": "string", "pattern": "(?=x)"}), [], "response_format.json_schema.schema"),
        (schema_task({"type": "array", "uniqueItems": True}), [], "response_format.json_schema.schema"),
        (schema_task({"const": "x" * SCHEMA_BYTES_MAX}), [], "response_format.json_schema.schema"),
        (schema_task({"type": "string", "pattern": "a" * 2049}), [], "response_format.json_schema.schema"),
        (schema_task({"patternProperties": {"a" * 2049: {}}}), [], "response_format.json_schema.schema"),
        (
            schema_task({"type": "object", "properties": {f"k{i}": {} for i in range(800)}}),
            [],
            "response_format.json_schema.schema",
        ),
        (
            schema_task({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            [],
            "response_format.json_schema.schema",
        ),
        (Generate(), [{"function": {"name": "f", "parameters": {"type": "string"}}}], "tools[0].function.parameters"),
        (Generate(form="regex", pattern=b"a" * 2049), [], "response_format.pattern"),
        (Generate(form="regex", pattern=b"["), [], "response_format.pattern"),
        (Generate(form="regex", pattern=b"(a){1,"), [], "response_format.pattern"),
        (
            Generate(),
            [TOOLS[0], {"type": "function", "function": {"name": "bad", "parameters": {"type": "strin"}}}],
            "tools[1].function.parameters",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_by_name(task: Generate, tools: list[dict[str, Any]], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        grammar(task, tools)

    assert caught.value.param == param
    assert len(caught.value.message) < 500


def test_a_function_that_is_not_strict_may_say_what_is_not_enforced() -> None:
    schema = {
        "type": "object",
        "properties": {"tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True}},
    }
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}

    assert accepts(
        grammar(Generate(tool_choice="required"), [tool]),
        CALL["hermes"].replace("get", "f").replace('{"city": "Rome"}', '{"tags": ["a"]}'),
    )
    with pytest.raises(InvalidRequest):
        grammar(Generate(), [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}])


def test_a_schema_that_is_not_strict_may_say_what_is_not_enforced() -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}

    assert accepts(grammar(Generate(form="json_schema", pattern=json.dumps(schema).encode(), is_lenient=True)), '["a"]')
    with pytest.raises(InvalidRequest):
        grammar(schema_task(schema))


def test_an_expression_that_cannot_be_followed_is_left_out_where_that_may_be() -> None:
    schema = {
        "type": "object",
        "properties": {"pattern": {"type": "string", "pattern": "(?=a)b"}, "const": {"const": {"pattern": "x"}}},
        "required": ["pattern", "const"],
    }
    found = grammar(Generate(form="json_schema", pattern=json.dumps(schema).encode(), is_lenient=True))

    assert accepts(found, '{"pattern": "any", "const": {"pattern": "x"}}')
    with pytest.raises(InvalidRequest, match="look-around") as caught:
        grammar(schema_task(schema))
    assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize("is_lenient", [True, False])
def test_that_names_are_texts_says_nothing(is_lenient: bool) -> None:
    schema = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"type": "integer", "maximum": 9},
    }
    found = grammar(Generate(form="json_schema", pattern=json.dumps(schema).encode(), is_lenient=is_lenient))

    assert accepts(found, '{"a": 1, "b": 2}')
    assert not accepts(found, '{"a": "x"}')


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "task",
    [
        schema_task(nested(100)),
        schema_task({"type": "string", "pattern": "(a{1,1000}){1,1000}"}),
        schema_task({"type": "string", "pattern": "((a|b)*c){50}((a|b)*d){500}"}),
        schema_task({"type": "string", "minLength": 100_000, "maxLength": 10_000_000}),
        schema_task({"anyOf": [{"type": "object", "required": [f"k{i}"]} for i in range(300)]}),
        schema_task({"$ref": "#"}),
        Generate(form="regex", pattern=b"(a+)+$"),
        Generate(form="regex", pattern=b"(.*a){50}"),
        Generate(form="regex", pattern=b"(x|xx|xxx){1,5000}y"),
        Generate(form="regex", pattern=b"(a{0,9999}){0,9999}"),
    ],
)
def test_hostile_patterns_are_refused_or_stay_within_their_limits(task: Generate) -> None:
    """No time is asserted: what has no limit would not come back."""
    try:
        found = grammar(task)
    except InvalidRequest:
        return
    matcher = LLMatcher(TOKENS, found, log_level=0)
    for _ in range(20):
        if matcher.is_error() or matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            break
        allowed = next((i for i in range(TOKENS.vocab_size) if mask[i // 8] >> (i % 8) & 1), None)
        assert allowed is not None
        matcher.consume_token(allowed)


def test_the_cache_is_bounded_in_count_and_bytes() -> None:
    cache = GrammarCache(TOKENS, count_max=2)
    for number in range(5):
        cache.check(grammar(Generate(form="regex", pattern=str(number).encode())), param="x")
    assert len(cache) == 2
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="invalid regex"):
            cache.check(BAD, param="x")
    assert len(cache) == 2
    small = GrammarCache(TOKENS, bytes_max=10)
    small.check(grammar(Generate(form="json_object")), param="x")
    assert len(small) == 0


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"properties": {"a": {"type": "integer"}}}, ['{"a": 1}', "{}"], ['{"a": 1, "b": 2}']),
        (
            {"properties": {"a": {"properties": {"b": {"type": "integer"}}}}},
            ['{"a": {"b": 1}}'],
            ['{"a": {"c": 1}}'],
        ),
        ({"properties": {"a": {"type": "integer"}}, "additionalProperties": True}, ['{"a": 1, "b": 2}'], []),
        # What cannot be followed otherwise is left as open as it was written.
        ({"properties": {"a": {"type": "integer"}}, "required": ["a", "b"]}, ['{"a": 1, "b": 2}'], ['{"a": 1}']),
        (
            {
                "$defs": {"x": {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}},
                "$ref": "#/$defs/x",
                "properties": {"a": {"type": "integer"}},
                "required": ["a"],
            },
            ['{"b": 2, "a": 1}'],
            ['{"b": 2}'],
        ),
    ],
)
def test_objects_keep_to_what_their_schema_lists_where_that_can_be(
    schema: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    found = grammar(schema_task({"type": "object", **schema}))

    assert [text for text in [*good, *bad] if accepts(found, text)] == good


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, ["-999999999999999", "0", "83"], ["1000000000000000", "1" * 30]),
        ({"type": "integer", "minimum": 1}, ["1", "999999999999999"], ["0", "1" * 30]),
        ({"type": "integer", "exclusiveMaximum": 0}, ["-1"], ["0", "-" + "1" * 30]),
        ({"type": "integer", "minimum": 10**17}, ["1" + "0" * 17], ["7"]),  # as its schema says
        ({"type": "integer", "enum": [1, 10**16]}, ["1" + "0" * 16], ["2"]),
        ({"type": ["integer", "null"]}, ["null", "3"], ["1" * 30]),
        ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["null", "3"], ["1" * 30]),
        ({"type": "number"}, ["12.99", "-0.123456789", "0"], ["0." + "3" * 30, "1" * 30]),
        ({"type": "number", "minimum": 0, "maximum": 1}, ["0.75", "1"], ["1.5", "0." + "3" * 30]),
        ({"type": "number", "multipleOf": 0.01}, ["12.99"], ["0.333"]),
    ],
)
def test_numbers_have_an_end(schema: dict[str, Any], good: list[str], bad: list[str]) -> None:
    found = grammar(schema_task({"type": "object", "properties": {"a": schema}, "required": ["a"]}))

    assert [text for text in [*good, *bad] if accepts(found, f'{{"a": {text}}}')] == good


def test_one_of_several_objects_is_closed_too() -> None:
    found = grammar(schema_task({"anyOf": [CITY | {"additionalProperties": True}, {"type": "null"}]}))
    assert accepts(found, '{"city": "Rome", "more": 1}'), "as the schema says"
    open_city = {name: value for name, value in CITY.items() if name != "additionalProperties"}
    found = grammar(schema_task({"anyOf": [open_city, {"type": "null"}]}))
    assert accepts(found, '{"city": "Rome"}')
    assert accepts(found, "null")
    assert not accepts(found, '{"city": "Rome", "more": 1}')


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 999_983},
        {"type": "number", "multipleOf": 0.999983},
        {"allOf": [{"type": "integer", "multipleOf": step} for step in (7, 11, 13, 17, 19)]},
        {"type": "object", "properties": {f"a{step}": {"type": "integer", "multipleOf": step} for step in (997, 991)}},
    ],
)
def test_multiples_that_would_take_minutes_are_refused_or_left_out(schema: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="multipleOf") as caught:
        grammar(schema_task(schema))
    assert caught.value.param == "response_format.json_schema.schema"
    lenient = Generate(form="json_schema", pattern=json.dumps(schema).encode(), is_lenient=True)
    assert 'multipleOf": 9' not in grammar(lenient)


@pytest.mark.parametrize(
    ("step", "good", "bad"), [(25_000, "75000", "70000"), (0.25, "1.75", "1.7"), (97, "194", "195")]
)
def test_multiples_are_followed(step: float, good: str, bad: str) -> None:
    found = grammar(schema_task({"type": "number", "multipleOf": step}))

    assert accepts(found, good)
    assert not accepts(found, bad)


def test_an_object_of_too_many_possible_properties_is_refused_at_once() -> None:
    properties = {f"p{number}": {"type": "string"} for number in range(OPTIONAL_MAX + 1)}
    with pytest.raises(InvalidRequest, match="not required"):
        grammar(schema_task({"type": "array", "items": {"type": "object", "properties": properties}}))

    required = {"type": "object", "properties": properties, "required": ["p0"]}
    assert accepts(grammar(schema_task(required)), '{"p0": "x", "p7": ""}')


def test_many_numbers_are_followed_as_they_were_written() -> None:
    names = [f"p{number}" for number in range(150)]
    schema = {"type": "object", "properties": {name: {"type": "integer"} for name in names}, "required": names}
    found = grammar(schema_task(schema))

    assert accepts(found, json.dumps(dict.fromkeys(names, 10**20)))
    assert not accepts(found, json.dumps(dict.fromkeys([*names, "more"], 1))), "and nothing else"


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"type": "string", "pattern": f".*x.{{{count}}}y.*"} for count in range(1, 30)]},
        {
            "$ref": "#/$defs/a",
            "pattern": ".*x.{9}y.*" * 4,
            "$defs": {"a": {"type": "string", "pattern": ".*z.{9}y.*" * 4}},
        },
        {
            "$ref": "#/$defs/a",
            "properties": {"p": {"type": "string", "pattern": ".*x.{9}y.*" * 4}},
            "$defs": {"a": {"type": "object", "properties": {"p": {"type": "string", "pattern": ".*z.{9}y.*" * 4}}}},
        },
        {"type": "object", "patternProperties": {f".*x.{{{count}}}y.*": {"type": "integer"} for count in range(1, 30)}},
        {"type": "string", "pattern": "(a{1000}){1000}"},
        {"type": "string", "pattern": "(a{1000,}){1000,}"},
        {
            "type": "object",
            "properties": {name: {"type": "integer", "multipleOf": 999_983} for name in ("default", "const")},
            "required": ["default", "const"],
        },
    ],
)
def test_what_never_ends_or_takes_gigabytes_is_refused_before_it_is_compiled(schema: dict[str, Any]) -> None:
    cache = GrammarCache(TOKENS)
    with pytest.raises(InvalidRequest) as caught:
        grammar(schema_task(schema), cache=cache)

    assert caught.value.param == "response_format.json_schema.schema"
    assert not len(cache)


def test_a_client_sets_nothing_of_the_compiler() -> None:
    schema = {"type": "object", "x-guidance": {"whitespace_pattern": "(.*a)" * 100, "whitespace_flexible": True}}

    assert "whitespace_pattern" not in grammar(schema_task(schema)).replace(json.dumps(schema), "")


@pytest.mark.parametrize(
    "expression",
    [r"[0-9]{4}-[0-9]{2}", r"([0-9a-f]{1,4}:){7}[0-9a-f]{1,4}", r".{1,500} - .{1,500}", r"\\{9999}", r"[{9999}]{3}"],
)
def test_expressions_that_are_used_are_taken(expression: str) -> None:
    assert grammar(Generate(form="regex", pattern=expression.encode()))


def test_a_property_may_be_called_as_a_keyword_is() -> None:
    names = ["default", "const", "pattern", "multipleOf"]
    number = {"type": "integer", "multipleOf": 999_983}
    schema = {"type": "object", "properties": dict.fromkeys(names, number), "required": names}
    found = grammar(Generate(form="json_schema", pattern=json.dumps(schema).encode(), is_lenient=True))

    assert accepts(found, json.dumps(dict.fromkeys(names, 5))), "what takes too long is left out of each"
    assert not accepts(found, "{}")


def test_what_a_reference_leads_to_is_looked_at_wherever_it_stands() -> None:
    schema = {"$ref": "#/default", "default": {"type": "integer", "multipleOf": 999_983}}
    lenient = Generate(form="json_schema", pattern=json.dumps(schema).encode(), is_lenient=True)

    with pytest.raises(InvalidRequest, match="multipleOf"):
        grammar(lenient)
