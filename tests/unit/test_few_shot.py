"""Classifying by examples: confidences that are probabilities, and a label that is where its examples are."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.compat.few_shot import Vectors, confidences

WIDTH = 16


def around(axis: int, count: int, *, seed: int, offset: float = 0.0) -> Vectors:
    """Unit vectors about one axis; `offset` moves all of them the same way, as some models' are."""
    vectors = np.random.default_rng(seed).normal(size=(count, WIDTH)) * 0.1 + offset
    vectors[:, axis] += 1
    result: Vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return result


@pytest.mark.parametrize("offset", [0.0, 0.5, 5.0])
@pytest.mark.parametrize("counts", [(2, 2, 2), (2, 5, 30)])
def test_an_input_has_the_label_of_the_examples_around_it(counts: tuple[int, ...], offset: float) -> None:
    examples = np.concatenate([around(axis, count, seed=axis, offset=offset) for axis, count in enumerate(counts)])
    labels = np.repeat(np.arange(len(counts)), counts)
    inputs = np.concatenate([around(axis, 10, seed=10 + axis, offset=offset) for axis in range(len(counts))])

    found = confidences(examples, labels, inputs, label_count=len(counts))

    assert found.argmax(axis=1).tolist() == np.repeat(np.arange(len(counts)), 10).tolist()


def test_an_example_is_of_its_own_label() -> None:
    examples = np.concatenate([around(0, 2, seed=1), around(1, 2, seed=2)])

    found = confidences(examples, np.array([0, 0, 1, 1]), examples, label_count=2)

    assert (found[[0, 1], 0] > 0.9).all()
    assert (found[[2, 3], 1] > 0.9).all()


def test_the_order_of_examples_changes_nothing() -> None:
    examples, labels = np.concatenate([around(0, 3, seed=1), around(1, 4, seed=2)]), np.array([0] * 3 + [1] * 4)
    inputs = around(0, 5, seed=3)
    order = np.random.default_rng(4).permutation(len(labels))

    found = confidences(examples, labels, inputs, label_count=2)

    shuffled = confidences(examples[order], labels[order], inputs, label_count=2)
    np.testing.assert_allclose(found, shuffled, atol=1e-9)


def test_examples_that_are_all_the_same_tell_nothing() -> None:
    examples = np.repeat(around(0, 1, seed=1), 4, axis=0)

    found = confidences(examples, np.array([0, 0, 1, 1]), around(1, 2, seed=2), label_count=2)

    assert found.tolist() == [[0.5, 0.5], [0.5, 0.5]]


@given(
    seed=st.integers(0, 2**32 - 1),
    label_count=st.integers(2, 5),
    extra=st.integers(0, 10),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
)
@settings(max_examples=50, deadline=None)
def test_confidences_are_probabilities(seed: int, label_count: int, extra: int, scale: float) -> None:
    random = np.random.default_rng(seed)
    labels = np.concatenate([np.repeat(np.arange(label_count), 2), random.integers(0, label_count, extra)])
    examples = random.normal(size=(len(labels), WIDTH)) * scale
    inputs = random.normal(size=(3, WIDTH)) * scale

    found = confidences(examples, labels, inputs, label_count=label_count)

    assert found.shape == (3, label_count)
    assert ((found >= 0) & (found <= 1)).all()
    np.testing.assert_allclose(found.sum(axis=1), 1)
