"""Errors of jobs in the client's own field names. A node counts the inputs of a job: to it they are `input[3]`."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from appliance.errors import ApplianceError

_INPUT = re.compile(r"input\[(\d+)\]")
_WORDS = re.compile(r"\binput (\d+)\b|'?\binput\[(\d+)\]'?")


@contextmanager
def naming(name_of: Callable[[int], str]) -> Iterator[None]:
    """An error that names an input names it by `name_of(index)` instead, as its `param` and in its message."""
    try:
        yield
    except ApplianceError as error:
        found = _INPUT.fullmatch(error.param or "")
        if found is None:
            raise
        name = name_of(int(found[1]))
        message = _WORDS.sub(lambda word: f"'{name}'" if (word[1] or word[2]) == found[1] else word[0], error.message)
        raise type(error)(message, param=name, retry_after_s=error.retry_after_s) from error
