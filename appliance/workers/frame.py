"""The special tokens that a model puts around a text, and how much text fits between them."""

from collections.abc import Sequence

from tokenizers import Tokenizer as RustTokenizer

from appliance.errors import InvalidRequest, TooLong
from appliance.workers import cutting
from appliance.workers.tokens import Window, tokens_of

_PROBES = ("a", "the", "0", ".", "一")  # texts of which one at least has a token in any vocabulary


class Frame:
    """Of one model. Errors name the client's input."""

    def __init__(self, rust: RustTokenizer, tokens_max: int) -> None:
        self.before, self.after = _special_tokens(rust)
        self._tokens_max = tokens_max

    def around(self, ids: Sequence[int]) -> list[int]:
        """A text's ids with the special tokens."""
        return [*self.before, *ids, *self.after]

    def limit(self, tokens_max: int | None) -> int:
        """The tokens that one input may have, special ones included; `tokens_max` can only lower the model's.

        Raises InvalidRequest for so few that no text fits.
        """
        if tokens_max is None or tokens_max >= self._tokens_max:
            return self._tokens_max
        self.room(tokens_max)
        return tokens_max

    def room(self, limit: int, *, prompt: Sequence[int] = ()) -> int:
        """The tokens of a text that fit within the limit beside special tokens and prompt.

        Raises InvalidRequest where there are none.
        """
        room = limit - len(self.before) - len(prompt) - len(self.after)
        if room < 1:
            raise InvalidRequest(
                "the special tokens and the prompt of the model leave no room for a text within the limit; raise "
                "'max_tokens' or leave it out",
                param="max_tokens",
            )
        return room

    def check_length(self, count: int, index: int, *, limit: int, is_cut: bool, field: str = "input") -> None:
        """Raises InvalidRequest for an input without tokens, and TooLong for one over the limit that is not cut."""
        name = f"input {index}" if field == "input" else f"the query with document {index}"
        if count == 0:  # only where the model wants no special tokens
            raise InvalidRequest(f"{name} has no tokens; send some text", param=f"{field}[{index}]")
        if count > limit and not is_cut:
            bound = "the model takes" if limit == self._tokens_max else "the request allows"
            raise TooLong(
                f"{name} has {count} tokens, {bound} {limit}; shorten it or allow truncation",
                param=f"{field}[{index}]",
            )

    def windows(
        self, ids: Sequence[int], *, prompt: Sequence[int], limit: int, windows_max: int, index: int
    ) -> list[Window]:
        """A text's ids in pieces, each with prompt and special tokens. Raises TooLong for too many of them."""
        room = self.room(limit, prompt=prompt)
        count = -(-len(ids) // room)
        if count > windows_max:
            raise TooLong(
                f"input {index} has {len(ids)} tokens, which is {count} pieces of {room}; at most {windows_max} are "
                "embedded as one: split it",
                param=f"input[{index}]",
            )
        pieces = cutting.pieces([*self.before, *prompt], ids, self.after, limit=limit)
        return [Window(tokens_of(piece.ids, is_truncated=False), piece.weight) for piece in pieces]


def _special_tokens(rust: RustTokenizer) -> tuple[list[int], list[int]]:
    """Those before a text and those after it."""
    for probe in _PROBES:
        encoding = rust.encode(probe)
        start, end = cutting.body(encoding.special_tokens_mask)
        if start < end:
            return list(encoding.ids[:start]), list(encoding.ids[end:])
    return list(rust.encode("").ids), []
