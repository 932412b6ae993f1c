"""A model's own chat template, rendered in a sandbox as transformers renders it.

The template comes with the model's verified files, never with a request. It is a program all the same: the sandbox
keeps it from everything but the messages.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import msgspec
from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from appliance.errors import InvalidRequest

TEMPLATE_NAME: Final = "chat_template.jinja"
_WORDS_MAX: Final = 300
# Templates with tools apart from the plain one: the plain one would leave them out.
_WITH_TOOLS: Final = "tool_use"
_TOKENS: Final = ("bos_token", "eos_token", "pad_token", "unk_token")

Message = dict[str, Any]  # `Any`: JSON, which templates read


class _Named(msgspec.Struct, frozen=True):
    name: str
    template: str


class _Config(msgspec.Struct, frozen=True):
    chat_template: str | list[_Named] | None = None


class ChatTemplate:
    """Messages in, the text of a prompt out. Thread-safe."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens` are the special ones that templates name: "bos_token" and the like. Raises ValueError."""
        self.source = source
        self.takes_tools = "tools" in source
        # What templates refuse with words of their own, and the client need not hear of. Mistral's want ids of calls
        # to have nine letters, or nine at least; Llama's know one call an answer; Gemma's first know no system.
        self.has_short_ids = re.search(r"IDs should be alphanumeric strings with length (>= )?9", source) is not None
        self.has_single_calls = "only supports single tool-calls" in source
        self.has_system = "System role not supported" not in source
        self._tokens = dict(tokens)
        try:
            self._template: Template = _environment().from_string(source)
        except TemplateError as exc:
            raise ValueError(f"the chat template cannot be read: {exc}") from exc

    @classmethod
    def load(cls, folder: Path) -> "ChatTemplate | None":
        """The template of a model folder; None for a model without. Raises ValueError for one that cannot be read."""
        config = _json(folder / "tokenizer_config.json", _Config()) or _Config()
        source = _source(folder, config)
        return None if source is None else cls(source, _special_tokens(folder))

    def token(self, name: str) -> str | None:
        """A special token that templates name, as a string."""
        return self._tokens.get(name)

    def render(self, messages: Sequence[Message], tools: Sequence[Any] = (), *, may_think: bool = True) -> str:
        """The prompt after which the assistant's next message comes.

        Without `may_think`, a template that can have the model answer at once does so. Raises InvalidRequest for
        messages that the template does not take, with its own words.
        """
        options = {} if may_think else {"enable_thinking": False}
        try:
            return self._template.render(
                messages=list(messages),
                tools=list(tools) or None,
                add_generation_prompt=True,
                **options,
                **self._tokens,
            )
        except (
            TemplateError,
            TypeError,
            ValueError,
            LookupError,
            AttributeError,
            ArithmeticError,
            RecursionError,
        ) as exc:
            words = " ".join(str(exc).split())[:_WORDS_MAX]
            raise InvalidRequest(
                f"the model's chat template does not take these messages: {words}", param="messages"
            ) from exc


class _Generation(Extension):
    """`{% generation %}` marks what a model is trained on; here it is only what is in it."""

    tags = {"generation"}  # noqa: RUF012  # as jinja2 has it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements within."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own, which escapes what HTML would take for tags. The options are those that transformers gives it.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(words: str) -> str:
    raise TemplateError(words)


def _now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _source(folder: Path, config: _Config) -> str | None:
    file = folder / TEMPLATE_NAME
    if file.is_file():
        return _text(file)
    if isinstance(config.chat_template, list):
        by_name = {named.name: named.template for named in config.chat_template}
        return by_name.get(_WITH_TOOLS) or by_name.get("default")
    return config.chat_template


def _special_tokens(folder: Path) -> dict[str, str]:
    """As strings; files have them as such, or as objects with a `content`."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        table = _json(folder / name, {})
        for key in _TOKENS:
            value = table.get(key) if isinstance(table, dict) else None
            content = value.get("content") if isinstance(value, dict) else value
            if isinstance(content, str):
                found[key] = content
    return found


def _json(path: Path, default: Any) -> Any:  # `Any`: of the default's type
    if not path.is_file():
        return default
    kind: Callable[..., Any] = type(default)
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as exc:
        raise ValueError(f"{path.name} cannot be read: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise ValueError(f"{path.name} cannot be read: {exc}") from exc


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"{path.name} cannot be read: {exc}") from exc
