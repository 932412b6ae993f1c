"""Tokens to text that is safe to send: it never ends within a character, nor with what may become a stop string."""

import codecs
from collections.abc import Collection, Sequence

from appliance.workers.writing.token_bytes import TokenBytes


class TextStream:
    """One text. `stop` is the stop string that was met, before which the text ended; "" until then."""

    def __init__(
        self,
        tokens: TokenBytes,
        *,
        stops: Sequence[str] = (),
        shown: Collection[int] = (),
        goes_on: bool = False,
    ) -> None:
        """Special tokens are left out, but for those of `shown`, which a parser wants to see.

        `goes_on`: the text goes on from its prompt's, so that a space it begins with is its own.
        """
        self._tokens = tokens
        self._shown = shown
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._is_first = tokens.drops_first_space and not goes_on
        self.stop = ""

    def push(self, ids: Sequence[int]) -> str:
        """What may be sent now that these tokens have come. Nothing comes after a stop string."""
        if self.stop:
            return ""
        return self._released(self._held + "".join(self._decoder.decode(self._bytes(token)) for token in ids))

    def flush(self) -> str:
        """The rest: no token comes any more."""
        if self.stop:
            return ""
        text = self._released(self._held + self._decoder.decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _bytes(self, token: int) -> bytes:
        if self._tokens.is_special(token) and token not in self._shown:
            return b""
        data = self._tokens.of(token)
        if self._is_first and data:
            self._is_first = False
            data = data.removeprefix(b" ")
        return data

    def _released(self, text: str) -> str:
        if not self._stops:
            self._held = ""
            return text
        # The first that is complete: which one it is does not depend on how the tokens come.
        found = [(place + len(stop), place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            _, place, self.stop = min(found)
            self._held = ""
            return text[:place]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def overlap(text: str, mark: str) -> int:
    """How many characters at the end of `text` may be the beginning of `mark`, which is not in it."""
    for size in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:size]):
            return size
    return 0
