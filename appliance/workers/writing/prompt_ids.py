"""Prompts to tokens, where special tokens come from the template alone: what a client wrote stays text.

Before a template is rendered, client strings that spell an added token are broken with a mark inside of it; the prompt
is cut at the marks and tokenized piece by piece. A prompt without such strings is tokenized in one go, as transformers
does it.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from tokenizers import Tokenizer as RustTokenizer

from appliance.errors import InvalidRequest
from appliance.workers.writing.messages import Message

# Noncharacters: Unicode has them for a program's own use, and no text has any to say.
_MARKS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


class PromptIds:
    """Of one tokenizer. Thread-safe."""

    def __init__(self, rust: RustTokenizer) -> None:
        self._rust = rust
        tokens = [token for token in rust.get_added_tokens_decoder().values() if len(token.content) > 1]
        self._special = _pattern([token.content for token in tokens if token.special])
        # Words of a model's own, such as <think>, which its earlier answers may well hold.
        self._any = _pattern([token.content for token in tokens])

    def guarded(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], list[Any], str]:
        """The same with its spellings of special tokens broken, and the mark that breaks them; "" where there are none.

        Raises InvalidRequest for a text that holds every possible mark.
        """
        wholes = [*messages, *tools]
        if not any(_search(self._any, whole) for whole in wholes):
            return list(messages), list(tools), ""
        mark = next((mark for mark in _MARKS if not any(_search(re.compile(mark), whole) for whole in wholes)), "")
        if not mark:
            raise InvalidRequest("the messages hold all of Unicode's noncharacters from U+FDD0 on; remove some")

        def broken(whole: Any, pattern: re.Pattern[str]) -> Any:
            return _mapped(whole, lambda text: pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text))

        return (
            [
                broken(message, self._special if message.get("role") == "assistant" else self._any)
                for message in messages
            ],
            [broken(tool, self._any) for tool in tools],
            mark,
        )

    def ids(self, prompt: str, *, mark: str = "") -> list[int]:
        """The tokens of a rendered prompt; its template has written the special ones at the start, too."""
        return self._pieces(prompt.split(mark) if mark else [prompt])

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a prompt without a template, with the tokenizer's own special ones; its text is text."""
        mark = next((mark for mark in _MARKS if mark not in text), "")
        pieces = self._any.sub(lambda found: found[0][0] + mark + found[0][1:], text).split(mark) if mark else [text]
        before = self._rust.encode("").ids  # what the tokenizer puts in front of any text
        return [*before, *self._pieces(pieces)]

    def _pieces(self, pieces: Sequence[str]) -> list[int]:
        return [token for piece in pieces if piece for token in self._rust.encode(piece, add_special_tokens=False).ids]


def _pattern(contents: Sequence[str]) -> re.Pattern[str]:
    """Any of the contents, the longest first; what never matches for none of them."""
    longest_first = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _search(pattern: re.Pattern[str], whole: Any) -> bool:
    if isinstance(whole, str):
        return pattern.search(whole) is not None
    if isinstance(whole, dict):
        return any(_search(pattern, key) or _search(pattern, value) for key, value in whole.items())
    return isinstance(whole, list) and any(_search(pattern, value) for value in whole)


def _mapped(whole: Any, change: Any) -> Any:
    if isinstance(whole, str):
        return change(whole)
    if isinstance(whole, dict):
        return {_mapped(key, change): _mapped(value, change) for key, value in whole.items()}
    return [_mapped(value, change) for value in whole] if isinstance(whole, list) else whole
