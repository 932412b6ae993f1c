"""Vectors cut to a width and means of vectors, against the same sums by hand."""

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.workers.vectors import shortened, weighted_means


def unit_rows(*rows: list[float]) -> npt.NDArray[np.float32]:
    matrix = np.array(rows, dtype=np.float64)
    return np.asarray(matrix / np.linalg.norm(matrix, axis=1, keepdims=True), dtype=np.float32)


def test_a_cut_vector_has_length_one_again() -> None:
    rows = unit_rows([3.0, 4.0, 5.0], [0.0, 2.0, 1.0])

    short, bad = shortened(rows, 2)

    assert bad == []
    assert short.dtype == np.float32
    np.testing.assert_allclose(short, [[0.6, 0.8], [0.0, 1.0]], atol=1e-6)


def test_a_vector_of_which_nothing_is_left_is_named() -> None:
    short, bad = shortened(unit_rows([1.0, 0.0, 0.0], [0.0, 0.0, 1.0]), 2)

    assert bad == [1]
    assert not short[1].any()


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    seed=st.integers(0, 2**32 - 1),
)
def test_means_are_those_of_each_text_alone(counts: list[int], seed: int) -> None:
    random = np.random.default_rng(seed)
    rows = unit_rows(*random.normal(size=(sum(counts), 6)).tolist())
    weights = random.integers(1, 300, size=sum(counts)).tolist()

    means, bad = weighted_means(rows, weights, counts)

    assert bad == []
    ends = np.cumsum(counts)
    for place, (end, count) in enumerate(zip(ends, counts, strict=True)):
        own, shares = rows[end - count : end], np.array(weights[end - count : end], dtype=np.float64)
        expected = (own.astype(np.float64) * shares[:, None]).sum(axis=0)
        np.testing.assert_allclose(means[place], expected / np.linalg.norm(expected), atol=1e-6)


def test_a_text_of_one_piece_keeps_its_vector_to_the_last_bit() -> None:
    rows = unit_rows([0.1, 0.2, 0.3], [1.0, 2.0, 3.0], [0.3, 0.1, 0.7])

    means, _ = weighted_means(rows, [7, 3, 9], [1, 2])

    assert means[0].tobytes() == rows[0].tobytes()


@pytest.mark.parametrize("width", [2, 384])
def test_pieces_that_cancel_each_other_are_named(width: int) -> None:
    random = np.random.default_rng(1)
    one, other = unit_rows(*random.normal(size=(2, width)).tolist())
    rows = np.stack([other, one, -one, one, other])

    means, bad = weighted_means(rows, [4, 5, 5, 2, 9], [1, 2, 2])

    assert bad == [1]
    assert not means[1].any()
    np.testing.assert_allclose(np.linalg.norm(means[[0, 2]], axis=1), 1.0, rtol=1e-6)
