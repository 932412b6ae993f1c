"""The batch as frames carry it ⇄ arrays: checked before a device sees it, and before a node does.

An out-of-range id is an illegal memory access on a GPU, which takes the whole process with it: nothing is left to the
runtime to find out.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from appliance.workers.wire import Encode


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


def finite(rows: npt.NDArray[np.float32], counts: Sequence[int]) -> tuple[npt.NDArray[np.float32], tuple[int, ...]]:
    """`rows` as they are, text i having `counts[i]` of them.

    The rows of a text that has any number which is not finite come back as zeros, with the text's position.
    """
    sound = np.ascontiguousarray(rows, dtype="<f4")
    starts = np.cumsum([0, *counts[:-1]])
    is_bad = np.add.reduceat(~np.isfinite(sound).all(axis=1), starts) > 0
    bad = tuple(int(position) for position in np.flatnonzero(is_bad))
    if bad:
        sound = np.where(np.repeat(is_bad, counts)[:, None], np.float32(0.0), sound)
    return sound, bad


def normalize(rows: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.float32], tuple[int, ...]]:
    """Scale each row to length one. Rows that are not finite or are zero come back as zeros, with their positions."""
    # In float64, so that the squares of large but finite values do not overflow.
    exact = rows.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1)
    good = np.isfinite(lengths) & (lengths > 0.0)
    unit = np.zeros(rows.shape, dtype="<f4")
    unit[good] = exact[good] / lengths[good, None]
    return unit, tuple(int(position) for position in np.flatnonzero(~good))
