"""Texts for a model that reads them as they are, with a tokenizer of its own in its engine."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from appliance.errors import InvalidRequest, TooLong
from appliance.workers.tokens import Cut, Tokens

CHARS_A_TOKEN: Final = 4  # of English text; only for batches, limits and usage


class RawText(NamedTuple):
    """What the engine gets of a text, and where in the client's text it begins, in characters."""

    tokens: Tokens
    start: int


class RawTexts:
    """Sizes texts in place of a tokenizer: four characters are counted as a token, begun ones as one."""

    def __init__(self, tokens_max: int) -> None:
        self.tokens_max = tokens_max

    def cut(self, texts: Sequence[str], *, truncation: Cut = "end", first_index: int = 0) -> list[RawText]:
        """Each text, if need be without its end or its start.

        Raises TooLong for one over the limit that may not be cut, and InvalidRequest for an empty one.
        """
        return [self._cut(text, truncation, index) for index, text in enumerate(texts, first_index)]

    def _cut(self, text: str, truncation: Cut, index: int) -> RawText:
        if not text:
            raise InvalidRequest(f"input {index} is empty; send some text", param=f"input[{index}]")
        chars_max = self.tokens_max * CHARS_A_TOKEN
        surplus = max(0, len(text) - chars_max)
        if surplus and truncation == "none":
            raise TooLong(
                f"input {index} has {len(text)} characters, the model takes {chars_max}; shorten it or have it cut",
                param=f"input[{index}]",
            )
        start = surplus if truncation == "start" else 0
        kept = text[start : start + chars_max]
        count = -(-len(kept) // CHARS_A_TOKEN)
        return RawText(Tokens(b"", count, surplus > 0, rows="any", text=kept), start)
