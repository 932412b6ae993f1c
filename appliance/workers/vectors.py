"""Vectors of texts: cut to a width, or made of those of a text's pieces. Pure; the inputs are rows of length one."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]

# Below it a sum of unit vectors is what rounding left of vectors that cancel each other: float32 has seven digits.
_LENGTH_MIN = 1e-6


def shortened(rows: Rows, width: int) -> tuple[Rows, list[int]]:
    """The first `width` numbers of each row, scaled to length one again (Matryoshka: Kusupati et al. 2022).

    Rows of which nothing is left come as zeros, and their positions.
    """
    return _unit(rows[:, :width])


def weighted_means(rows: Rows, weights: Sequence[int], counts: Sequence[int]) -> tuple[Rows, list[int]]:
    """Of each text, which has `counts[i]` consecutive rows, the mean by weight, scaled to length one.

    A single row stays as it is. Texts whose rows cancel each other come as zeros, and their positions.
    """
    starts = np.cumsum([0, *counts[:-1]])
    weighted = rows.astype(np.float64) * np.asarray(weights, dtype=np.float64)[:, None]
    sums = np.add.reduceat(weighted, starts) / np.add.reduceat(np.asarray(weights, np.float64), starts)[:, None]
    means, bad = _unit(sums)
    is_single = np.asarray(counts) == 1
    means[is_single] = rows[starts[is_single]]
    return means, [position for position in bad if not is_single[position]]


def _unit(rows: npt.NDArray[np.floating]) -> tuple[Rows, list[int]]:
    exact = rows.astype(np.float64)
    lengths = np.linalg.norm(exact, axis=1)
    is_good = lengths > _LENGTH_MIN
    unit = np.zeros(rows.shape, dtype="<f4")
    unit[is_good] = exact[is_good] / lengths[is_good, None]
    return unit, [int(position) for position in np.flatnonzero(~is_good)]
