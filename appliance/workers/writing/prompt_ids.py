"""Prompts to tokens, where special tokens come from the template alone: what a client wrote stays text.

Before a template is rendered, client strings that spell an added token are broken with a mark inside of it; the prompt
is cut at the marks and tokenized piece by piece. A prompt without such strings is tokenized in one go, as transformers
does it.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from appliance.errors import InvalidRequest
from appliance.workers import cutting
from appliance.workers.writing.messages import Message

# Noncharacters: Unicode has them for a program's own use, and no text has any to say.
_MARKS: Final = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_SPACES: Final = " \t\n\r▁"

Change = Callable[[str], str]


class PromptIds:
    """Of one tokenizer. Thread-safe. `normalized` messages only: what JSON escapes in a string is not seen here."""

    def __init__(self, rust: RustTokenizer) -> None:
        self._rust = rust
        # A token of one character is that character: it cannot be broken, nor is any known that is a mark.
        tokens = [token for token in rust.get_added_tokens_decoder().values() if len(token.content) > 1]
        # Some vocabularies add runs of white space, which are text like any other.
        marks = [token for token in tokens if token.special or token.content.strip(_SPACES)]
        self._special = _Spellings(rust, [token for token in marks if token.special])
        # Words of a model's own, such as <think>, which its earlier answers may well hold.
        self._any = _Spellings(rust, marks)
        self._anchor = next((found for token in tokens if (found := _anchor(rust, token))), None)

    def guarded(self, messages: Sequence[Message], tools: Sequence[Any]) -> tuple[list[Message], list[Any], str]:
        """The same with its spellings of special tokens broken, and the mark that breaks them; "" where there are none.

        Raises InvalidRequest for a text that holds every possible mark.
        """
        wholes = [*messages, *tools]
        if not any(self._any.are_in(text) for whole in wholes for text in _texts(whole)):
            return list(messages), list(tools), ""
        mark = next((mark for mark in _MARKS if not any(mark in text for one in wholes for text in _texts(one))), "")
        if not mark:
            raise InvalidRequest(
                "the messages hold all of Unicode's noncharacters from U+FDD0 on; remove some", param="messages"
            )
        return (
            [
                _mapped(message, (self._special if message["role"] == "assistant" else self._any).breaker(mark))
                | {"role": message["role"]}
                for message in messages
            ],
            [_mapped(tool, self._any.breaker(mark)) for tool in tools],
            mark,
        )

    def ids(self, prompt: str, *, mark: str = "") -> list[int]:
        """The tokens of a rendered prompt; its template has written the special ones at the start, too."""
        return self._pieces(prompt.split(mark) if mark else [prompt])

    def text_ids(self, text: str) -> list[int]:
        """The tokens of a prompt without a template, with the tokenizer's own special ones; its text is text.

        Raises InvalidRequest for a text that holds every possible mark.
        """
        pieces = [text]
        if self._any.are_in(text):
            mark = next((mark for mark in _MARKS if mark not in text), "")
            if not mark:
                raise InvalidRequest(
                    "'prompt' holds all of Unicode's noncharacters from U+FDD0 on; remove some", param="prompt"
                )
            pieces = self._any.breaker(mark)(text).split(mark)
        return [*self._before(), *self._pieces(pieces)]

    def _before(self) -> list[int]:
        """What the tokenizer puts in front of any text."""
        encoding = self._rust.encode("a")
        start, _ = cutting.body(encoding.special_tokens_mask)
        return list(encoding.ids[:start])

    def _pieces(self, pieces: Sequence[str]) -> list[int]:
        first, *others = pieces
        found = self._ids(first) if first else []
        for piece in others:
            if piece:
                found += self._inner(piece)
        return found

    def _inner(self, piece: str) -> list[int]:
        """The tokens of a piece that other text stands before: SentencePiece begins only a whole text with a space."""
        if self._anchor is None:
            return self._ids(piece)
        content, token = self._anchor
        ids = self._ids(content + piece)
        if ids[0] != token:  # a longer one begins like it
            return self._ids(piece)
        return ids[1:]

    def _ids(self, text: str) -> list[int]:
        # As a batch: for one text alone the library keeps Python's lock, for seconds where it is long.
        return list(self._rust.encode_batch_fast([text], add_special_tokens=False)[0].ids)


class _Spellings:
    """Of some added tokens in texts."""

    def __init__(self, rust: RustTokenizer, tokens: Sequence[AddedToken]) -> None:
        self._pattern = any_of(token.content for token in tokens)
        # Such tokens are looked for in what the normalizer makes of a text.
        self._normalizer = rust.normalizer if any(token.normalized for token in tokens) else None

    def are_in(self, text: str) -> bool:
        """Whether any of them is."""
        return self._pattern.search(text) is not None or self._are_in_normalized(text)

    def breaker(self, mark: str) -> Change:
        """Puts the mark, which is in no text, within each of them."""

        def broken(text: str) -> str:
            while self._pattern.search(text):  # one may lie within another
                text = self._pattern.sub(lambda found: found[0][0] + mark + found[0][1:], text)
            return mark.join(text) if self._are_in_normalized(text) else text

        return broken

    def _are_in_normalized(self, text: str) -> bool:
        if self._normalizer is None:
            return False
        return self._pattern.search(self._normalizer.normalize_str(text)) is not None


def any_of(contents: Iterable[str]) -> re.Pattern[str]:
    """Any of the contents, the longest first, however many there are; what never matches for none of them."""
    root: dict[str, Any] = {}  # a trie: of letters, and "" where a content ends
    for content in contents:
        node = root
        for letter in content:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_spelled(root) or r"(?!)")


def _spelled(node: dict[str, Any]) -> str:
    line = ""
    while len(node) == 1 and "" not in node:
        ((letter, node),) = node.items()
        line += re.escape(letter)
    branches = [re.escape(letter) + _spelled(inner) for letter, inner in node.items() if letter]
    if not branches:
        return line
    return f"{line}(?:{'|'.join(branches)}){'?' if '' in node else ''}"


def _anchor(rust: RustTokenizer, token: AddedToken) -> tuple[str, int] | None:
    """A special token that other text may follow without being changed by it, and its number."""
    if not token.special or token.rstrip or token.single_word:
        return None
    ids = rust.encode(token.content, add_special_tokens=False).ids
    return (token.content, ids[0]) if len(ids) == 1 else None


def _texts(whole: Any) -> Iterable[str]:  # `Any`: JSON
    """Every string in it, keys too."""
    row = [whole]
    while row:
        one = row.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            row += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            row += one


def _mapped(whole: Any, change: Change) -> Any:  # `Any`: JSON
    if isinstance(whole, str):
        return change(whole)
    if isinstance(whole, dict):
        return {_mapped(key, change): _mapped(value, change) for key, value in whole.items()}
    return [_mapped(value, change) for value in whole] if isinstance(whole, list) else whole
