"""Batches as frames carry them: what is refused before a device sees it, and what never counts as a vector."""

import numpy as np
import pytest

from appliance.workers.engines.packing import normalize, unpack
from appliance.workers.wire import Encode


def batch_of(ids: list[int], lengths: tuple[int, ...]) -> Encode:
    return Encode(1, "m", np.array(ids, dtype="<i4").tobytes(), lengths)


def test_a_batch_comes_apart_at_its_lengths() -> None:
    texts = unpack(batch_of([5, 6, 7, 0, 9], (2, 1, 2)), vocabulary=10, tokens_max=2)

    assert [text.tolist() for text in texts] == [[5, 6], [7], [0, 9]]


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([], (), "empty"),
        ([1], (1, 0), "without tokens"),
        ([1], (2, -1), "without tokens"),
        ([1, 2, 3, 4], (4,), "has 4 tokens, the model takes 3"),
        ([1, 2], (1,), "do not match"),
        ([1, 2], (3,), "do not match"),
        ([-1], (1,), "from -1 to -1"),
        ([3, 10], (2,), "from 3 to 10, the vocabulary has 10"),
    ],
)
def test_a_malformed_batch_is_refused(ids: list[int], lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        unpack(batch_of(ids, lengths), vocabulary=10, tokens_max=3)


def test_a_batch_whose_ids_are_no_whole_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="do not match"):
        unpack(Encode(1, "m", b"\x00\x00\x00", (1,)), vocabulary=10, tokens_max=3)


def test_rows_come_out_with_length_one() -> None:
    unit, bad = normalize(np.array([[3.0, 4.0], [1e30, 0.0], [1e-30, 1e-30]], dtype=np.float32))

    assert bad == ()
    np.testing.assert_allclose(unit, [[0.6, 0.8], [1.0, 0.0], [0.5**0.5, 0.5**0.5]], rtol=1e-6)


def test_rows_that_are_not_finite_or_zero_are_named_and_blanked() -> None:
    rows = np.array([[1.0, 0.0], [np.nan, 1.0], [np.inf, 1.0], [0.0, 0.0], [0.0, 2.0]], dtype=np.float32)

    unit, bad = normalize(rows)

    assert bad == (1, 2, 3)
    np.testing.assert_array_equal(unit, [[1, 0], [0, 0], [0, 0], [0, 0], [0, 1]])


def test_batches_share_few_sizes_and_little_is_spare() -> None:
    torch = pytest.importorskip("torch")
    assert torch
    from appliance.workers.engines.packed.pack import shared_size  # noqa: PLC0415  # needs torch

    sizes = {shared_size(rows) for rows in range(1, 4097)}

    assert len(sizes) <= 100
    for rows in range(1, 10_000):
        assert rows <= shared_size(rows) <= rows + max(15, rows / 8)
