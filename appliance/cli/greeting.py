"""What `appliance up` says to a person: where it will answer, and once it does, to which names and calls. Pure."""

import shlex
import textwrap
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from appliance.catalog import Catalog, Entry
from appliance.presets import TaskName

_COLUMNS: Final = 100
_CHAT: Final = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 50,
    "temperature": 0,
}
# By a model's first task: a path below the base URL, and what is asked besides the model. `Any`: JSON.
_CALLS: Final[dict[TaskName, tuple[str, dict[str, Any]]]] = {
    "embed": ("embeddings", {"input": "hello"}),
    "rerank": ("rerank", {"query": "fruit", "documents": ["an apple", "a car"]}),
    "classify": ("classify", {"inputs": ["hello"]}),
    "extract": ("extract", {"input": "Ada Lovelace lived in London"}),
    "generate": ("chat/completions", _CHAT),
}


def starting(base_url: str, catalog: Catalog) -> str:
    """Said at once: a first start takes a while."""
    return f"base URL: {base_url}\nstarting: {_models(catalog)}"


def ready(base_url: str, catalog: Catalog, *, has_keys: bool) -> str:
    """Said when every model has answered: each with what it does and its other names, and calls to paste."""
    entries = catalog.entries()
    lines = [f"ready: serving {_models(catalog)} at {base_url}"]
    for model in entries:
        if model.is_alias_of is None:
            lines += [f"  {model.id}: {', '.join(model.tasks)}", *_aliases(model.id, entries)]
    key, heading = ("$KEY", "set KEY to one of your keys, and try it:") if has_keys else ("any", "try it:")
    return "\n".join([*lines, heading, *(_call(model, base_url, key) for model in _examples(entries))])


def _models(catalog: Catalog) -> str:
    count = len(catalog.models())
    return "1 model" if count == 1 else f"{count} models"


def _aliases(model: str, entries: Iterable[Entry]) -> list[str]:
    names = ", ".join(entry.id for entry in entries if entry.is_alias_of == model)
    indent = " " * 6
    return (
        textwrap.wrap(
            f"also {names}",
            _COLUMNS,
            initial_indent=indent,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        if names
        else []
    )


def _examples(entries: Iterable[Entry]) -> Iterable[Entry]:
    """The first model of each kind of call."""
    found: dict[TaskName, Entry] = {}
    for entry in entries:
        found.setdefault(entry.tasks[0], entry)
    return found.values()


def _call(model: Entry, base_url: str, key: str) -> str:
    path, fields = _CALLS[model.tasks[0]]
    body = msgspec.json.encode({"model": model.id, **fields}).decode()
    return (
        f"  curl -s {shlex.quote(f'{base_url}/{path}')} -H 'content-type: application/json' \\\n"
        f'    -H "authorization: Bearer {key}" -d {shlex.quote(body)}'
    )
