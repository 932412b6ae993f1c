"""Which words a field of a body may have: for the client who sent another."""

import re
from collections.abc import Iterable, Iterator

from msgspec import inspect

_STEP = re.compile(r"\[[^]]*\]|[^.\[]+")


def words_at(kind: object, path: str) -> tuple[str, ...]:
    """Of the field that msgspec calls `path` ("tools[0].type") within a type, sorted; () where it may have any."""
    found: Iterable[inspect.Type] = [inspect.type_info(kind)]
    for step in _STEP.findall(path):
        found = [inner for outer in found for inner in _within(outer, step)]
    return tuple(sorted({word for one in found for word in _words(one)}))


def _within(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    match kind:
        case inspect.UnionType(types=types):
            for one in types:
                yield from _within(one, step)
        case inspect.Metadata(type=inner):
            yield from _within(inner, step)
        case inspect.ListType(item_type=inner) | inspect.VarTupleType(item_type=inner):
            if step.startswith("["):
                yield inner
        case inspect.DictType(value_type=inner):
            if step == "[...]":
                yield inner
        case inspect.StructType() as struct:
            yield from (field.type for field in struct.fields if field.encode_name == step)
            if struct.tag_field == step:
                yield inspect.LiteralType((struct.tag,))


def _words(kind: inspect.Type) -> Iterator[str]:
    match kind:
        case inspect.UnionType(types=types):
            for one in types:
                yield from _words(one)
        case inspect.Metadata(type=inner):
            yield from _words(inner)
        case inspect.LiteralType(values=values):
            yield from (value for value in values if isinstance(value, str))
