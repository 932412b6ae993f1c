"""Vectors as bytes: comparable between requests, close to the floats, and packed as Cohere packs them."""

import numpy as np
import pytest

from appliance.compat.quantized import ByteType, Vectors, quantized

KINDS: tuple[ByteType, ...] = ("int8", "uint8", "binary", "ubinary")


def unit(count: int, width: int, *, seed: int = 0) -> Vectors:
    vectors = np.random.default_rng(seed).normal(size=(count, width))
    result: Vectors = (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype("<f4")
    return result


@pytest.mark.parametrize("width", [8, 384, 1024])
def test_cosines_stay(width: int) -> None:
    vectors = unit(20, width)

    found = quantized(vectors, "int8").astype(np.float64)

    lengths = np.linalg.norm(found, axis=1)
    np.testing.assert_allclose((found * vectors).sum(axis=1) / lengths, 1, atol=1e-3)
    np.testing.assert_allclose(found @ found.T / np.outer(lengths, lengths), vectors @ vectors.T, atol=2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_is_the_same_in_any_company(kind: ByteType) -> None:
    vectors = unit(5, 64)
    large = np.concatenate([vectors[2:3], np.eye(64, dtype="<f4")])

    assert quantized(vectors, kind)[2].tolist() == quantized(large, kind)[0].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_length_does_not_matter(kind: ByteType) -> None:
    vectors = unit(5, 64)

    assert quantized(vectors * 100, kind).tolist() == quantized(vectors, kind).tolist()


def test_unsigned_bytes_are_the_signed_ones_moved() -> None:
    vectors = unit(10, 64)

    assert (quantized(vectors, "uint8").astype(int) - quantized(vectors, "int8") == 128).all()
    assert (quantized(vectors, "ubinary").astype(int) - quantized(vectors, "binary") == 128).all()


def test_what_is_out_of_range_is_cut_off_and_zero_is_zero() -> None:
    vectors = np.array([[1, 0, 0, 0] + [0] * 380, [-1, 0, 0, 0] + [0] * 380], "<f4")

    assert quantized(vectors, "int8")[:, :2].tolist() == [[127, 0], [-127, 0]]
    assert quantized(vectors, "uint8")[:, :2].tolist() == [[255, 128], [1, 128]]


def test_bits_are_packed_from_the_highest() -> None:
    vectors = np.array([[1, -1, 1, 0, -1, -1, -1, 1, 0.5, -1]], "<f4")

    assert quantized(vectors, "ubinary").tolist() == [[0b10100001, 0b10000000]]
    assert quantized(vectors, "binary").tolist() == [[0b10100001 - 128, 0]]


def test_zeros_that_were_added_change_no_other_number() -> None:
    vectors = unit(3, 48)
    padded = np.pad(vectors, ((0, 0), (0, 16)))

    assert quantized(padded, "int8", width=48)[:, :48].tolist() == quantized(vectors, "int8").tolist()
    assert not quantized(padded, "int8", width=48)[:, 48:].any()
    assert quantized(padded, "ubinary", width=48)[:, :6].tolist() == quantized(vectors, "ubinary").tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_a_vector_of_zeros_is_no_fault(kind: ByteType) -> None:
    assert len(set(quantized(np.zeros((1, 16), "<f4"), kind)[0].tolist())) == 1
