"""Tokens to text that never ends within a character, and text to what may be sent of it, given where it is to stop."""

import codecs
from collections.abc import Collection, Sequence

from appliance.workers.writing.token_bytes import TokenBytes


class TextStream:
    """The characters of one text."""

    def __init__(self, tokens: TokenBytes, *, shown: Collection[int] = (), goes_on: bool = False) -> None:
        """Special tokens are left out, but for those of `shown`, which a parser wants to see.

        `goes_on`: the text goes on from its prompt's, so that a space it begins with is its own.
        """
        self._tokens = tokens
        self._shown = shown
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_first = tokens.drops_first_space and not goes_on

    def push(self, ids: Sequence[int]) -> str:
        """The characters that are whole now that these tokens have come."""
        return "".join(self._decoder.decode(self._bytes(token)) for token in ids)

    def flush(self) -> str:
        """The rest: no token comes any more."""
        return self._decoder.decode(b"", final=True)

    def _bytes(self, token: int) -> bytes:
        if self._tokens.is_special(token) and token not in self._shown:
            return b""
        data = self._tokens.of(token)
        if self._is_first and data:
            self._is_first = False
            data = data.removeprefix(b" ")
        return data


class Stops:
    """A text up to the first of some strings. `found` is the one that was met; "" until then."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # what may become the beginning of one
        self.found = ""

    def feed(self, text: str) -> str:
        """What may be sent. Nothing comes after a stop string."""
        if self.found or not self._stops:
            return "" if self.found else text
        text = self._held + text
        # The first that is complete: which one it is does not depend on how the text comes.
        met = [(place + len(stop), place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if met:
            _, place, self.found = min(met)
            self._held = ""
            return text[:place]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held: no text comes any more, or none that could go on with it."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`, which is not in it."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
