"""Read TOML tables strictly into Structs, with errors that a person can act on.

A syntax error names file and line; an unknown key gets a did-you-mean; a bad value is answered with the name of the
setting, the value and what is allowed, taken from the Struct's own annotations. Everything raises `StartupError`.
"""

import difflib
import tomllib
import types
import typing
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from appliance.errors import StartupError

FILE_BYTES_MAX = 1024 * 1024
VALUE_CHARS_MAX = 80


def read_toml(path: Path) -> dict[str, Any]:
    """The file as a table. Raises `StartupError` when it is missing, unreadable, too large or not TOML."""
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError as exc:
        raise StartupError(f"{path} does not exist; create it or name another file") from exc
    except OSError as exc:
        raise StartupError(f"{path} cannot be read: {exc.strerror}") from exc
    if len(data) > FILE_BYTES_MAX:
        raise StartupError(f"{path} is over {FILE_BYTES_MAX} B; a file of settings is far smaller")
    try:
        return tomllib.loads(data.decode("utf-8"))
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise StartupError(f"{path}, line {line}: not UTF-8; save the file as UTF-8") from exc
    except tomllib.TOMLDecodeError as exc:
        last_line = data.rstrip(b"\n").count(b"\n") + 1
        reason = str(exc).replace("at end of document", f"at line {last_line}, the end of the file")
        raise StartupError(f"{path} is not valid TOML: {reason}") from exc


def check_table(
    table: object,
    kind: type[msgspec.Struct],
    *,
    path: str,
    source: str,
    secrets: Container[str] = (),
    is_partial: bool = False,
) -> None:
    """Raise `StartupError` for the first key or value of `table` that `kind` does not take.

    `path` is the dotted name of the table ("" for a whole file), `source` the file it came from, `secrets` the dotted
    names whose value no error may show. A key without a default must be there, unless the table `is_partial`, with
    those in it: one layer of several.
    """
    if not isinstance(table, dict):
        raise StartupError(f"{source}: {path} is {shown(table)}, it must be a table")
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key, value in table.items():
        name = f"{path}.{key}" if path else key
        if key not in fields:
            hint = did_you_mean(key, fields)
            raise StartupError(f"{source}: unknown key {name}{hint}; known here: {', '.join(sorted(fields))}")
        _check_value(value, fields[key].type, path=name, source=source, secrets=secrets, is_partial=is_partial)
    missing = [name for name, field in fields.items() if field.required and name not in table]
    if missing and not is_partial:
        raise StartupError(f"{source}: {path or 'the file'} lacks the key {missing[0]}")


def _check_value(
    value: object, kind: Any, *, path: str, source: str, secrets: Container[str], is_partial: bool
) -> None:
    struct, item = struct_of(kind), item_of(kind)
    if struct is not None:
        check_table(value, struct, path=path, source=source, secrets=secrets, is_partial=is_partial)
    elif item is not None and struct_of(item) is not None and isinstance(value, list):
        for index, entry in enumerate(value):
            _check_value(entry, item, path=f"{path}[{index}]", source=source, secrets=secrets, is_partial=is_partial)
    else:
        convert(value, kind, name=f"{source}: {path}", is_secret=path in secrets)


def convert(value: object, kind: Any, *, name: str, is_secret: bool = False, is_text: bool = False) -> Any:
    """`value` as the annotation `kind` has it; `is_text` parses numbers out of a string, as the environment needs.

    Raises `StartupError`: "<name> is <value>, it must be <what is allowed>".
    """
    # `Any`: the type is only known as an annotation of a field; the caller puts the value into that field.
    try:
        return msgspec.convert(value, kind, strict=not is_text)
    except msgspec.ValidationError as exc:
        said = f"{type(value).__name__} (not shown: it is a secret)" if is_secret else shown(value)
        # The cause is left out for a secret: library errors may quote what they refuse.
        raise StartupError(f"{name} is {said}, it must be {allowed(kind)}") from (None if is_secret else exc)


def allowed(kind: Any) -> str:
    """What the annotation takes, in words: "a whole number from 1 to 65535"."""
    return _words(inspect.type_info(kind))


def _words(info: inspect.Type) -> str:  # noqa: PLR0911 - one line per type
    match info:
        case inspect.IntType():
            return "a whole number" + _range(info)
        case inspect.FloatType():
            return "a number" + _range(info)
        case inspect.BoolType():
            return "true or false"
        case inspect.StrType():
            return "a text"
        case inspect.LiteralType(values=values):
            return "one of " + ", ".join(f'"{value}"' for value in values)
        case inspect.VarTupleType(item_type=item) | inspect.ListType(item_type=item):
            return f"a list, each item {_words(item)}"
        case inspect.UnionType(types=kinds):
            return " or ".join(_words(kind) for kind in kinds if not isinstance(kind, inspect.NoneType))
        case inspect.DictType(value_type=item):
            return "a table" if isinstance(item, inspect.AnyType) else f"a table, each value {_words(item)}"
        case _:
            return "a table"


def _range(info: inspect.IntType | inspect.FloatType) -> str:
    words = []
    if info.ge is not None:
        words.append(f"from {info.ge}" if info.le is not None else f"of at least {info.ge}")
    if info.gt is not None:
        words.append(f"above {info.gt}")
    if info.le is not None:
        words.append(f"to {info.le}" if info.ge is not None else f"up to {info.le}")
    if info.lt is not None:
        words.append(f"below {info.lt}")
    return "".join(f" {word}" for word in words)


def struct_of(kind: Any) -> type[msgspec.Struct] | None:
    """The Struct that `kind` is, alone or as `Struct | None`."""
    if isinstance(kind, types.UnionType):
        kinds = [member for member in typing.get_args(kind) if member is not types.NoneType]
        return struct_of(kinds[0]) if len(kinds) == 1 else None
    return kind if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else None


def item_of(kind: Any) -> Any:
    """`X` of `tuple[X, ...]`, else None."""
    arguments = typing.get_args(kind)
    return arguments[0] if typing.get_origin(kind) is tuple and arguments[1:] == (...,) else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean "x"?` for the closest known name, "" when none is close. Costs little for any `name`."""
    folded = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name[:VALUE_CHARS_MAX].lower(), folded, n=1)
    return f'; did you mean "{folded[close[0]]}"?' if close else ""


def shown(value: object) -> str:
    """`value` for a message, cut to a bounded length."""
    text = repr(value)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}…"
