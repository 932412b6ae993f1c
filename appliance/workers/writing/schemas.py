"""A client's JSON schema before llguidance compiles it: what is refused, left out, or written more narrowly. Pure.

llguidance has limits of its own, but none that holds for some of what a few hundred bytes can ask for. What is known to
take minutes or gigabytes is told apart here, by looks alone.
"""

import math
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, Final, NamedTuple

from appliance.errors import InvalidRequest

SCHEMA_BYTES_MAX: Final = 256 * 1024
# Of one regular expression. Longer ones can take seconds and gigabytes before llguidance's own limits stop them:
# measured with ten thousand of ".*", whose every token took a second.
PATTERN_CHARS_MAX: Final = 2048
# Of one expression, with what is repeated written out: a count within a count takes seconds to be refused.
PATTERN_SIZE_MAX: Final = 20_000
# Of expressions that may have to hold together, whose automaton is the product of theirs: 29 of ten characters took
# gigabytes and never ended.
JOINED_CHARS_MAX: Final = 60
# llguidance makes a state of each remainder of a `multipleOf`, and of each combination of several: measured with
# 999,983, which took 14 s and 350 MB.
REMAINDERS_MAX: Final = 10_000
# Of one object. Each may be the next, and llguidance follows no more possibilities; of some thousands it takes ten
# seconds to say so.
OPTIONAL_MAX: Final = 499
# Bounds of a number take some milliseconds to compile: where there are more numbers, none is bounded.
_BOUNDED_NUMBERS_MAX: Final = 100
# Of fifteen digits, which every reader of JSON takes exactly; llguidance counts no finer than the step.
_NUMBER_MAX: Final = 10**15 - 1
_NUMBER_STEP: Final = 1e-9

_PIECES: Final = re.compile(  # of an expression: an escape, a set, a count, a character
    r"\\.|\[(?:\\.|[^\]\\])*\]|\{(?:\d*,)?(?P<count>\d+)\}|\{(?P<least>\d+),\}|.", re.DOTALL
)
# Keys of a schema under which there are schemas by names that clients choose, and those under which there are values.
_BY_NAME: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_VALUES: Final = frozenset({"const", "default", "enum", "examples"})
_PATTERNS: Final = frozenset({"pattern", "patternProperties"})
_STEPS: Final = frozenset({"multipleOf"})
# Keys that bring other schemas in, and those that constrain what these constrain as well.
_JOINING: Final = frozenset({"$ref", "anyOf", "oneOf"})
_JOINED: Final = _JOINING | {
    "properties",
    "patternProperties",
    "additionalProperties",
    "items",
    "prefixItems",
    "pattern",
}
_OPEN_BY_MEANING: Final = (
    "additionalProperties",
    "patternProperties",
    "unevaluatedProperties",
    "minProperties",
    "anyOf",
    "oneOf",
    "$ref",
)

Schema = dict[str, Any]  # `Any`: JSON


def check(schema: Schema, size: int, param: str) -> None:
    """Raises InvalidRequest for what is refused even where not all has to be followed: what is too much of something.

    `size` is in bytes.
    """
    if size > SCHEMA_BYTES_MAX:
        raise InvalidRequest(f"'{param}' has {size} bytes, the limit is {SCHEMA_BYTES_MAX}", param=param)
    for one in _objects(schema):
        for pattern in _patterns(one):
            check_pattern(pattern, param)
        optional = _optional(one)
        if optional > OPTIONAL_MAX:
            raise InvalidRequest(
                f"'{param}' has an object of {optional} properties that are not required, the limit is {OPTIONAL_MAX}",
                param=param,
            )


def check_pattern(expression: str, param: str) -> None:
    """Raises InvalidRequest for a regular expression that is too long, or would be with its counts written out."""
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


def followable(schema: Schema, param: str, *, is_lenient: bool) -> Schema:
    """The schema without what says nothing, and where that may be, without what would take too long to compile.

    Raises InvalidRequest for that, where it may not be left out or there is more of it than is seen.
    """
    found: Schema = _without(schema, _says_nothing)
    for bound in _BOUNDS:
        if not bound.is_over(found):
            continue
        found = _without(found, _is_of(bound.keys)) if is_lenient else found
        if bound.is_over(found):
            raise InvalidRequest(f"'{param}' {bound.words}", param=param)
    return found


def without_patterns(schema: Schema) -> Schema:
    """Without its regular expressions."""
    found: Schema = _without(schema, _is_of(_PATTERNS))
    return found


def closed(schema: Schema) -> Schema:
    """The schema, where objects have no other properties than those they list, and numbers an end.

    What a schema leaves open, a small model fills with whatever comes to it, to the limit of its tokens. What is
    written fits the client's own schema all the same.
    """
    numbers = sum(bool(_kinds(one) & {"integer", "number"}) for one in _objects(schema))
    found: Schema = _closed(schema, has_ends=numbers <= _BOUNDED_NUMBERS_MAX)
    return found


def _objects(schema: Schema) -> Iterator[dict[str, Any]]:
    """Every JSON object in it, be it a schema or not: references may lead anywhere."""
    row: list[Any] = [schema]
    while row:
        one = row.pop()
        if isinstance(one, list):
            row += one
        elif isinstance(one, dict):
            row += one.values()
            yield one


def _without(value: Any, is_out: Callable[[str, Any], bool], *, is_by_name: bool = False) -> Any:  # `Any`: JSON
    """Without the keys of schemas that are out; a client's names of properties are none."""
    if isinstance(value, list):
        return [_without(each, is_out) for each in value]
    if not isinstance(value, dict):
        return value
    if is_by_name:
        return {name: _without(inner, is_out) for name, inner in value.items()}
    return {
        name: inner if name in _VALUES else _without(inner, is_out, is_by_name=name in _BY_NAME)
        for name, inner in value.items()
        if not is_out(name, inner)
    }


def _is_of(keys: frozenset[str]) -> Callable[[str, Any], bool]:
    return lambda name, _: name in keys


def _says_nothing(name: str, inner: Any) -> bool:  # `Any`: JSON
    """That names are texts."""
    return name == "propertyNames" and inner in (True, {}, {"type": "string"})


def _patterns(one: dict[str, Any]) -> list[str]:
    by_name, own = one.get("patternProperties"), one.get("pattern")
    return [*(by_name if isinstance(by_name, dict) else ()), *([own] if isinstance(own, str) else ())]


def _kinds(one: dict[str, Any]) -> set[str]:
    kind = one.get("type")
    return {each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)}


def _optional(one: dict[str, Any]) -> int:
    """How many properties of an object are not required."""
    properties, required = one.get("properties"), one.get("required")
    if not isinstance(properties, dict):
        return 0
    names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
    return sum(name not in names for name in properties)


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
        elif digits := found["count"] or found["least"]:
            count = min(int(digits), PATTERN_SIZE_MAX + 1)
            sums[-1] += last * (count - 1)
            last *= count
        else:
            last = 1
            sums[-1] += 1
    return sum(sums)


def _has_joined(schema: Schema) -> bool:
    """Whether expressions may have to hold together that are longer than can be followed so."""
    chars, may_join = 0, False
    for one in _objects(schema):
        patterns = _patterns(one)
        chars += sum(map(len, patterns))
        is_joined = bool(one.keys() & _JOINING) and len(one.keys() & _JOINED) > 1
        may_join = may_join or is_joined or "allOf" in one or len(patterns) > 1 or ("format" in one and bool(patterns))
    return may_join and chars > JOINED_CHARS_MAX


def _has_many_remainders(schema: Schema) -> bool:
    """Whether too many have to be told apart at once, where all multiples that the schema names come together."""
    steps = {
        _digits(step)
        for one in _objects(schema)
        if isinstance(step := one.get("multipleOf"), int | float) and math.isfinite(step) and step
    }
    return math.prod(steps) > REMAINDERS_MAX


def _digits(number: float) -> int:
    """Of a number, without its point and the zeros at its ends: 25 of 0.250 and of 2500."""
    return int("".join(map(str, Decimal(str(number)).normalize().as_tuple().digits)))


class _Bound(NamedTuple):
    """What would take too long to compile, and the keys without which it is not there."""

    is_over: Callable[[Schema], bool]
    keys: frozenset[str]
    words: str


_BOUNDS: Final = (
    _Bound(
        _has_joined,
        _PATTERNS,
        "has expressions that may have to hold together ('allOf', or beside a '$ref'), of more than "
        f"{JOINED_CHARS_MAX} characters",
    ),
    _Bound(
        _has_many_remainders,
        _STEPS,
        f"has a 'multipleOf' that cannot be followed, or several: their digits multiply to more than {REMAINDERS_MAX}",
    ),
)


def _closed(schema: Any, *, has_ends: bool) -> Any:  # `Any`: JSON
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


def _ends(schema: Schema) -> Schema:
    """Bounds of a number, where its schema has none: without, it may have digits to the end of the text."""
    kinds = _kinds(schema)
    if not kinds & {"integer", "number"} or "enum" in schema or "const" in schema:
        return {}
    lows = [schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema]
    highs = [schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema]
    if not all(isinstance(bound, int | float) and abs(bound) < _NUMBER_MAX for bound in (*lows, *highs)):
        return {}
    found: Schema = {}
    if not lows:
        found["minimum"] = -_NUMBER_MAX
    if not highs:
        found["maximum"] = _NUMBER_MAX
    if "number" in kinds and "multipleOf" not in schema:
        found["multipleOf"] = _NUMBER_STEP
    return found
