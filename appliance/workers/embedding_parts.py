"""The parts of an embedding's answer, made of the rows that an engine gave for each input. Pure.

Parts are bounded in size, except that an input's own answer is never cut. Errors name the client's input.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from appliance.errors import BadVector
from appliance.jobs import Part, SparseRow, SparseRows, TokenRows
from appliance.workers import read_job, vectors

_SPARSE_WIDTH = 2  # an id and its weight


def dense(
    buffers: Sequence[memoryview], width: int, bytes_max: int, *, asked: int | None = None, first_index: int = 0
) -> list[Part]:
    """A vector an input, cut to `asked` numbers where the model gives more."""
    if asked is None or asked == width:
        return read_job.rows(buffers, width, bytes_max)
    return _rows(read_job.matrix(buffers, width), bytes_max, asked=asked, first_index=first_index)


def means(
    buffers: Sequence[memoryview],
    width: int,
    bytes_max: int,
    *,
    weights: Sequence[int],
    counts: Sequence[int],
    asked: int | None = None,
    first_index: int = 0,
) -> list[Part]:
    """A vector an input, each the mean of those of its `counts[i]` pieces."""
    rows, cancelled = vectors.weighted_means(read_job.matrix(buffers, width), weights, counts)
    _check(cancelled, first_index, "the vectors of its pieces cancel each other; split it, or let its end be cut")
    return _rows(rows, bytes_max, asked=asked or width, first_index=first_index)


def multivector(buffers: Sequence[memoryview], width: int, bytes_max: int) -> list[Part]:
    """The vectors of each input's tokens."""
    sizes = [len(buffer) for buffer in buffers]
    return [
        TokenRows(tuple(bytes(buffer) for buffer in buffers[start:end]), width)
        for start, end in _groups(sizes, bytes_max)
    ]


def sparse(buffers: Sequence[memoryview], width: int, bytes_max: int, *, first_index: int = 0) -> list[Part]:
    """The weights of each input's ids, from rows of (id, weight)."""
    rows = [_sparse_row(buffer, width, index) for index, buffer in enumerate(buffers, first_index)]
    sizes = [len(row.indices) + len(row.values) for row in rows]
    return [SparseRows(tuple(rows[start:end])) for start, end in _groups(sizes, bytes_max)]


def _rows(rows: vectors.Rows, bytes_max: int, *, asked: int, first_index: int) -> list[Part]:
    if asked != rows.shape[1]:
        rows, empty = vectors.shortened(rows, asked)
        _check(empty, first_index, f"nothing is left of its vector within {asked} dimensions")
    parts: list[Part] = read_job.rows([memoryview(rows.tobytes())], asked, bytes_max)
    return parts


def _sparse_row(buffer: memoryview, width: int, index: int) -> SparseRow:
    pairs = np.frombuffer(buffer, dtype="<f4").reshape(-1, width)
    is_sound = width == _SPARSE_WIDTH and bool(np.isfinite(pairs).all())
    if is_sound:
        ids = pairs[:, 0]
        is_sound = bool((ids == np.floor(ids)).all() and (ids >= 0).all() and (np.diff(ids) > 0).all())
    if not is_sound:
        raise BadVector(f"input[{index}]: the model gave no sparse vector for it", param=f"input[{index}]")
    return SparseRow(pairs[:, 0].astype("<i4").tobytes(), pairs[:, 1].astype("<f4").tobytes())


def _check(bad: Sequence[int], first_index: int, reason: str) -> None:
    if bad:
        name = f"input[{first_index + bad[0]}]"
        raise BadVector(f"{name}: {reason}", param=name)


def _groups(sizes: Sequence[int], bytes_max: int) -> Iterator[tuple[int, int]]:
    """Start and end of consecutive inputs of together at most `bytes_max`; a larger one goes alone."""
    start, total = 0, 0
    for position, size in enumerate(sizes):
        if position > start and total + size > bytes_max:
            yield start, position
            start, total = position, 0
        total += size
    if start < len(sizes):
        yield start, len(sizes)
