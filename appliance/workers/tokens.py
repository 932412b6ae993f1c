"""Token ids as items carry them."""

import sys
from array import array
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

ID_BYTES = 4
Cut = Literal["end", "start", "none"]  # what becomes of a text over the limit: it loses its end or start, or is refused


class Tokens(msgspec.Struct, frozen=True):
    """What an engine computes as one: a text, a pair, or a piece of a text.

    `len(ids) == 4 * count`, int32 little-endian, special tokens included. A model that parses has no ids: it reads
    `text`, and `count` is an estimate.
    """

    ids: bytes
    count: int
    is_truncated: bool
    second_start: int = (
        0  # of a pair, where token type 1 begins; 0 where the model is not told which text a token is of
    )
    rows: Literal["one", "per_token", "any"] = "one"  # how many rows of numbers come back for it
    text: str = ""


class Window(NamedTuple):
    """A piece of a text that is too long for one, with the special tokens and the prompt."""

    tokens: Tokens
    weight: int  # its share of the text: tokens of the text alone, neither the prompt's nor special ones


class Marked(msgspec.Struct, frozen=True):
    """One tokenized text that remembers where its tokens stand in it."""

    tokens: Tokens
    offsets: npt.NDArray[np.int32]  # [count, 2], characters; (0, 0) for special tokens
    words: npt.NDArray[np.int32]  # [count]; which word of the text, -1 for special tokens


def tokens_of(ids: Sequence[int], *, is_truncated: bool) -> Tokens:
    """One text of these ids."""
    return Tokens(packed(ids), len(ids), is_truncated)


def packed(ids: Sequence[int]) -> bytes:
    """As int32 little-endian."""
    found = array("i", ids)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()
