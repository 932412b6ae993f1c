"""Errors of jobs in the client's own field names. A node uses OpenAI's: `input[3]`, `dimensions`."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from appliance.errors import ApplianceError

_INPUT = re.compile(r"input\[(\d+)\]")
_WORDS = re.compile(r"\binput (\d+)\b|'?\binput\[(\d+)\]'?")


@contextmanager
def naming(name_of: Callable[[int], str], fields: Mapping[str, str] | None = None) -> Iterator[None]:
    """An error that names an input names it by `name_of(index)` instead, and one that names one of `fields` by its
    value there, as its `param` and in its message."""
    try:
        yield
    except ApplianceError as error:
        param = error.param or ""
        if found := _INPUT.fullmatch(param):
            name = name_of(int(found[1]))
            message = _WORDS.sub(
                lambda word: f"'{name}'" if (word[1] or word[2]) == found[1] else word[0], error.message
            )
        elif fields and param in fields:
            name = fields[param]
            message = error.message.replace(f"'{param}'", f"'{name}'")
        else:
            raise
        raise type(error)(message, param=name, retry_after_s=error.retry_after_s) from error
