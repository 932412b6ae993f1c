"""Which tokens of a text are kept when it is too long. Pure: works on the ids and masks that a tokenizer gives."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")


class Piece(NamedTuple):
    """A part of a text that is too long for one."""

    ids: list[int]
    weight: int  # its share of the text: tokens of the text alone, neither the prompt's nor special ones


def body(special_tokens_mask: Sequence[int]) -> tuple[int, int]:
    """Where a text's own tokens begin and end.

    The mask marks what the model's template put around the text, not what the text itself spells out.
    """
    if 0 not in special_tokens_mask:
        return len(special_tokens_mask), len(special_tokens_mask)
    return special_tokens_mask.index(0), len(special_tokens_mask) - special_tokens_mask[::-1].index(0)


def kept(values: Sequence[T], special_tokens_mask: Sequence[int], *, limit: int, keeps_end: bool) -> Sequence[T]:
    """Of something per token, what is left when the text loses its end, or its start."""
    surplus = len(values) - limit
    if surplus <= 0:
        return values
    start, end = body(special_tokens_mask)
    cut = start if keeps_end else end - surplus
    return [*values[:cut], *values[cut + surplus :]]


def without_start(values: Sequence[T], special_tokens_mask: Sequence[int], *, limit: int, prompt: int) -> Sequence[T]:
    """Like `kept`, of a text over the limit whose first `prompt` tokens go last."""
    start, end = body(special_tokens_mask)
    surplus = len(values) - limit
    cut = min(start + prompt, end - surplus)
    return [*values[:cut], *values[cut + surplus :]]


def pieces(head: Sequence[int], ids: Sequence[int], tail: Sequence[int], *, limit: int) -> list[Piece]:
    """`ids` in consecutive pieces between `head` and `tail`, all of `limit` ids but the last."""
    room = limit - len(head) - len(tail)
    assert room > 0, "checked before"
    starts = range(0, len(ids), room)
    return [Piece([*head, *ids[start : start + room], *tail], len(ids[start : start + room])) for start in starts]


def longest_first(first: int, second: int, *, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept to fit into `room` together: the longer one loses them first."""
    shorter, longer = sorted((first, second))
    longer = min(longer, max(shorter, room - shorter))
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (shorter, longer) if first <= second else (longer, shorter)
