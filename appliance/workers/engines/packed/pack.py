"""A batch laid end to end."""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

# Up to so many rows, sizes are multiples of this: at most a sixteenth is spare beyond the first few texts.
_SIZE_MULTIPLES: Final = ((256, 16), (1024, 32), (4096, 64), (math.inf, 256))


class Segment(NamedTuple):
    """The rows of one text."""

    start: int
    length: int


class Pack(NamedTuple):
    """The tokens of all texts, in order, and `rows - tokens` spare rows that belong to none.

    The spare rows let a text's keys be read in whole multiples (see masks.py) past the end of the last text, and keep
    the number of different sizes small (`shared_size`).
    """

    ids: torch.Tensor  # int32 [rows]
    positions: torch.Tensor  # int32 [rows], as the model counts them
    segments: tuple[Segment, ...]
    tokens: int
    rows: int
    types: torch.Tensor | None = None  # int32 [rows], where a text has a second part


def pack(
    texts: Sequence[npt.NDArray[np.int32]],
    *,
    device: str,
    keys_multiple: int,
    first_position: int = 0,
    pad_id: int | None = None,
    second_starts: Sequence[int] = (),
) -> Pack:
    """Lay `texts` (at least one, none empty) end to end.

    Positions count from `first_position`. With `pad_id`, tokens of that id all have the position `pad_id` and do not
    count, as RoBERTa numbers them. `second_starts[i]` > 0 is where the second part of text i begins.
    """
    lengths = [len(text) for text in texts]
    starts = np.cumsum([0, *lengths[:-1]]).tolist()
    tokens = sum(lengths)
    rows = max(start + rounded_up(length, keys_multiple) for start, length in zip(starts, lengths, strict=True))
    if device == "cpu":
        rows = shared_size(rows)
    ids = np.zeros(rows, dtype=np.int32)
    np.concatenate(texts, out=ids[:tokens])
    positions = np.zeros(rows, dtype=np.int32)
    np.concatenate(
        [np.arange(first_position, first_position + n, dtype=np.int32) for n in lengths], out=positions[:tokens]
    )
    if pad_id is not None and (ids[:tokens] == pad_id).any():
        _renumber(ids, positions, starts, lengths, first_position=first_position, pad_id=pad_id)
    types = _types(rows, starts, lengths, second_starts) if any(second_starts) else None
    return Pack(
        torch.from_numpy(ids).to(device),
        torch.from_numpy(positions).to(device),
        tuple(map(Segment, starts, lengths)),
        tokens,
        rows,
        None if types is None else torch.from_numpy(types).to(device),
    )


def shared_size(rows: int) -> int:
    """`rows`, or a little more: a size that many batches share.

    oneDNN generates a kernel for each size of a matrix product and keeps about a thousand. Were every batch of a size
    of its own, generating would take up to a fifth of the time, and MiniLM's kernels alone over a gigabyte.
    """
    multiple = next(multiple for limit, multiple in _SIZE_MULTIPLES if rows <= limit)
    return rounded_up(rows, multiple)


def rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _renumber(
    ids: npt.NDArray[np.int32],
    positions: npt.NDArray[np.int32],
    starts: Sequence[int],
    lengths: Sequence[int],
    *,
    first_position: int,
    pad_id: int,
) -> None:
    """A text may spell out the padding token; the model then gives that token the padding's position."""
    for start, length in zip(starts, lengths, strict=True):
        is_counted = ids[start : start + length] != pad_id
        counted = np.cumsum(is_counted) + (first_position - 1)
        positions[start : start + length] = np.where(is_counted, counted, pad_id)


def _types(
    rows: int, starts: Sequence[int], lengths: Sequence[int], second_starts: Sequence[int]
) -> npt.NDArray[np.int32]:
    types = np.zeros(rows, dtype=np.int32)
    for start, length, second in zip(starts, lengths, second_starts, strict=True):
        if second > 0:
            types[start + second : start + length] = 1
    return types
