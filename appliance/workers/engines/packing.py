"""The batch as frames carry it ⇄ arrays: checked before a device sees it, and before a node does.

An out-of-range id is an illegal memory access on a GPU, which takes the whole process with it: nothing is left to the
runtime to find out.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from appliance.workers.wire import Encode

PAIR_NUMBERS: Final = 2  # an id of the vocabulary and its weight


def unpack(batch: Encode, *, vocabulary: int, tokens_max: int) -> list[npt.NDArray[np.int32]]:
    """The token ids of each text. Raises ValueError for a batch that is not well-formed."""
    if not batch.lengths:
        raise ValueError("the batch is empty")
    if min(batch.lengths) < 1:
        raise ValueError("the batch holds a text without tokens")
    if max(batch.lengths) > tokens_max:
        raise ValueError(f"a text has {max(batch.lengths)} tokens, the model takes {tokens_max}")
    if len(batch.ids) != 4 * sum(batch.lengths):
        raise ValueError(f"{len(batch.ids)} B of ids do not match {sum(batch.lengths)} announced tokens")
    ids = np.frombuffer(batch.ids, dtype="<i4")
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise ValueError(f"token ids reach from {ids.min()} to {ids.max()}, the vocabulary has {vocabulary}")
    return np.split(ids, np.cumsum(batch.lengths[:-1]))


def second_starts_of(batch: Encode) -> tuple[int, ...]:
    """Where token type 1 begins in each text, 0 for nowhere. Raises ValueError for a place outside its text."""
    if not batch.second_starts:
        return (0,) * len(batch.lengths)
    if len(batch.second_starts) != len(batch.lengths):
        raise ValueError(f"{len(batch.second_starts)} second_starts do not match {len(batch.lengths)} texts")
    for start, length in zip(batch.second_starts, batch.lengths, strict=True):
        if not 0 <= start < length:
            raise ValueError(f"a second part starts at {start} in a text of {length} tokens")
    return batch.second_starts


def per_token_of(batch: Encode, *, is_able: bool) -> tuple[int, ...]:
    """The positions whose tokens' vectors are wanted. Raises ValueError for what is none, or a model without."""
    if batch.per_token and not is_able:
        raise ValueError("the model gives no vectors of tokens")
    if any(not 0 <= position < len(batch.lengths) for position in batch.per_token):
        raise ValueError(f"per_token names positions outside the batch of {len(batch.lengths)} texts")
    return batch.per_token


def row_counts(lengths: Sequence[int], per_token: Sequence[int]) -> tuple[int, ...]:
    """How many rows each text has: one, or one a token."""
    if not per_token:
        return (1,) * len(lengths)
    wanted = frozenset(per_token)
    return tuple(length if position in wanted else 1 for position, length in enumerate(lengths))


def finite(rows: npt.NDArray[np.float32], counts: Sequence[int]) -> tuple[npt.NDArray[np.float32], tuple[int, ...]]:
    """`rows` as they are, text i having `counts[i]` of them, at least one.

    The rows of a text that has any number which is not finite come back as zeros, with the text's position.
    """
    sound = np.ascontiguousarray(rows, dtype="<f4")
    return _blanked(sound, np.isfinite(sound).all(axis=1), counts)


def normalize(
    rows: npt.NDArray[np.float32], counts: Sequence[int] = ()
) -> tuple[npt.NDArray[np.float32], tuple[int, ...]]:
    """Scale each row to length one, text i having `counts[i]` of them, at least one; (): one each.

    The rows of a text that has any row which is not finite or is zero come back as zeros, with the text's position.
    """
    # In float64, so that the squares of large but finite values do not overflow.
    exact = rows.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1)
    good = np.isfinite(lengths) & (lengths > 0.0)
    unit = np.zeros(rows.shape, dtype="<f4")
    unit[good] = exact[good] / lengths[good, None]
    return _blanked(unit, good, counts or (1,) * len(rows))


def pairs(rows: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], tuple[int, ...]]:
    """[texts, vocabulary] → rows of (id, weight) of what is not zero, ids ascending, and how many each text has.

    float32 holds ids up to 16 million exactly.
    """
    texts, ids = np.nonzero(rows)
    found = np.stack((ids.astype(np.float32), rows[texts, ids]), axis=1)
    counts = np.bincount(texts, minlength=len(rows))
    return found, tuple(int(count) for count in counts)


def _blanked(
    rows: npt.NDArray[np.float32], is_good: npt.NDArray[np.bool_], counts: Sequence[int]
) -> tuple[npt.NDArray[np.float32], tuple[int, ...]]:
    """`rows`, those of each text with a row that is not good as zeros, and the positions of such texts."""
    if is_good.all():
        return rows, ()
    is_bad = np.add.reduceat(~is_good, np.cumsum([0, *counts[:-1]])) > 0
    blanked = np.where(np.repeat(is_bad, counts)[:, None], np.float32(0.0), rows)
    return blanked, tuple(int(position) for position in np.flatnonzero(is_bad))
