"""Batches as frames carry them: what is refused before a device sees it, and what never counts as a vector."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from appliance.workers.engines.fake import FakeEngine
from appliance.workers.engines.packing import normalize, row_counts, unpack
from appliance.workers.wire import Encode, Load


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


def test_texts_with_a_row_a_token_are_normalized_and_blanked_whole() -> None:
    rows = np.array([[3, 4], [0, 0], [5, 0], [np.inf, 1], [1, 1], [0, 2]], dtype="<f4")

    unit, bad = normalize(rows, (1, 2, 2, 1))

    assert bad == (1, 2)
    expected = np.array([[0.6, 0.8], [0, 0], [0, 0], [0, 0], [0, 0], [0, 1]], dtype=np.float32)
    np.testing.assert_allclose(unit, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("per_token", "counts"), [((), (1, 1, 1)), ((1,), (1, 5, 1)), ((2, 0), (3, 1, 2)), ((0, 1, 2), (3, 5, 2))]
)
def test_how_many_rows_each_text_has(per_token: tuple[int, ...], counts: tuple[int, ...]) -> None:
    assert row_counts((3, 5, 2), per_token) == counts


def test_the_fake_gives_token_vectors_too(tmp_path: Path) -> None:
    engine = FakeEngine()
    loaded = engine.load(Load("m", str(tmp_path), "float32", "cpu", 1))
    batch = msgspec.structs.replace(batch_of([5, 6, 7, 6], (2, 1, 1)), per_token=(0,))

    encoded = engine.encode(batch)

    rows = np.frombuffer(encoded.rows, dtype="<f4").reshape(-1, encoded.width)
    assert loaded.has_token_vectors
    assert encoded.counts == (2, 1, 1)
    np.testing.assert_array_equal(rows[1], rows[3])  # the same token
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=1e-6)
    with pytest.raises(ValueError, match="outside the batch"):
        engine.encode(msgspec.structs.replace(batch, per_token=(3,)))


def test_batches_share_few_sizes_and_little_is_spare() -> None:
    torch = pytest.importorskip("torch")
    assert torch
    from appliance.workers.engines.packed.pack import shared_size  # noqa: PLC0415  # needs torch

    sizes = {shared_size(rows) for rows in range(1, 4097)}

    assert len(sizes) <= 100
    for rows in range(1, 10_000):
        assert rows <= shared_size(rows) <= rows + max(15, rows / 8)
