"""The cost model: recovers known coefficients, stays non-negative, and follows a drift."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.presets import Coefficients
from appliance.workers.cost import UNKNOWN, USUAL_TOKENS, CostModel, Measured, calibration_batches, fit

SHAPES = calibration_batches(tokens_max=256, batch_tokens_max=4096, batch_items_max=256)
coefficients = st.builds(
    Coefficients,
    batch_ms=st.floats(0, 20),
    token_ms=st.floats(0.001, 1),
    square_ms=st.floats(0, 0.001),
    item_ms=st.floats(0, 2),
)


@settings(deadline=None, max_examples=50)
@given(coefficients)
def test_exact_measurements_give_the_coefficients_back(true: Coefficients) -> None:
    model = CostModel(true)

    found = fit([Measured(shape, model.batch_ms(shape)) for shape in SHAPES])

    for shape in SHAPES:
        assert CostModel(found.coefficients).batch_ms(shape) == pytest.approx(model.batch_ms(shape), rel=1e-3)
    assert found.error_p95 < 1e-3


@settings(deadline=None, max_examples=50)
@given(coefficients, st.integers(0, 1000))
def test_noise_leaves_the_coefficients_non_negative_and_the_error_told(true: Coefficients, seed: int) -> None:
    chance = random.Random(seed)
    model = CostModel(true)
    measured = [Measured(shape, model.batch_ms(shape) * chance.uniform(0.9, 1.1)) for shape in SHAPES]

    found = fit(measured)

    values = found.coefficients
    assert min(values.batch_ms, values.token_ms, values.square_ms, values.item_ms) >= 0
    assert 0 < found.error_median <= found.error_p95 <= 0.25


def test_a_batch_costs_its_parts_and_one_share_for_being_one() -> None:
    model = CostModel(Coefficients(batch_ms=2.0, token_ms=0.5, square_ms=0.01, item_ms=1.0))

    assert model.item_ms(10) == pytest.approx(1.0 + 5.0 + 1.0)
    assert model.batch_ms((10, 10)) == pytest.approx(2.0 + 2 * model.item_ms(10))


@pytest.mark.parametrize("slowness", [0.5, 3.0])
def test_predictions_follow_a_machine_that_changed(slowness: float) -> None:
    model = CostModel(Coefficients(batch_ms=1.0, token_ms=0.1, square_ms=0.0, item_ms=0.0))
    measured_ms = slowness * model.batch_ms((50,))
    first = model.learn((50,), measured_ms)
    assert first == pytest.approx(slowness)

    for _ in range(200):
        ratio = model.learn((50,), measured_ms)

    assert ratio == pytest.approx(1.0, abs=0.01)
    assert model.drift == pytest.approx(slowness, rel=0.01)


def test_one_outlier_moves_predictions_little() -> None:
    model = CostModel(UNKNOWN)
    before_ms = model.batch_ms((100,))
    model.learn((100,), 10 * before_ms)

    assert model.batch_ms((100,)) < 1.2 * before_ms


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 8192), st.integers(16, 65536), st.integers(1, 1024))
def test_calibration_keeps_the_bounds_of_a_batch(tokens_max: int, batch_tokens_max: int, items_max: int) -> None:
    shapes = calibration_batches(tokens_max=tokens_max, batch_tokens_max=batch_tokens_max, batch_items_max=items_max)

    assert shapes
    for shape in shapes:
        assert max(shape) <= tokens_max
        assert len(shape) <= items_max
        assert sum(shape) <= batch_tokens_max or len(shape) == 1


def test_a_full_batch_is_one_of_usual_texts() -> None:
    model = CostModel(Coefficients(batch_ms=2.0, token_ms=0.5, square_ms=0.01, item_ms=1.0))

    assert model.full_batch_ms(4 * USUAL_TOKENS) == pytest.approx(model.batch_ms((USUAL_TOKENS,) * 4))
