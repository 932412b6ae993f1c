"""The predicted time of a batch: t = a + b·T + c·Σn² + d·B, in milliseconds. Pure.

T is the batch's tokens, Σn² the sum of its texts' squared lengths (attention), B its texts. The coefficients are fitted
by non-negative least squares on measured batches, each weighted by 1/t, so that small batches count as much as large
ones; what drifts afterwards (temperature, neighbours) is followed by a running ratio of measured to predicted.
"""

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from appliance.presets import Coefficients

USUAL_TOKENS = 128  # of a text, where only a batch's tokens are known
DRIFT_SMOOTHING = 0.05  # weight of the newest batch in the running ratio
DRIFT_MIN, DRIFT_MAX = 0.001, 1000.0  # wide: costs that were never measured are found by drifting there
UNKNOWN = Coefficients(batch_ms=1.0, token_ms=0.05, square_ms=0.0, item_ms=0.0)  # until a model is measured


class Measured(msgspec.Struct, frozen=True):
    """One batch that was run."""

    lengths: tuple[int, ...]
    ms: float


class Fit(msgspec.Struct, frozen=True):
    """Coefficients and how well they tell: relative errors |predicted - measured| / measured."""

    coefficients: Coefficients
    error_median: float
    error_p95: float


class CostModel:
    """Predicts, and corrects itself."""

    def __init__(self, coefficients: Coefficients) -> None:
        self.replace(coefficients)

    def replace(self, coefficients: Coefficients) -> None:
        """Start anew from these."""
        self.coefficients = coefficients
        self._drift = 1.0

    @property
    def drift(self) -> float:
        """Measured ÷ predicted, lately; 1 when the fit still holds."""
        return self._drift

    def item_ms(self, tokens: int) -> float:
        """What one more text adds to a batch."""
        found = self.coefficients
        return self._drift * (found.item_ms + found.token_ms * tokens + found.square_ms * tokens * tokens)

    def batch_ms(self, lengths: Sequence[int]) -> float:
        """What a batch of these texts takes."""
        return self._drift * _predicted_ms(self.coefficients, lengths)

    def full_batch_ms(self, tokens: int) -> float:
        """What a batch of so many tokens takes, in texts of usual length."""
        found, texts = self.coefficients, tokens / USUAL_TOKENS
        square_ms = found.square_ms * texts * USUAL_TOKENS**2
        return self._drift * (found.batch_ms + found.token_ms * tokens + square_ms + found.item_ms * texts)

    def learn(self, lengths: Sequence[int], ms: float) -> float:
        """Follow one measured batch; returns measured ÷ predicted as it was before."""
        predicted_ms = self.batch_ms(lengths)
        if predicted_ms <= 0 or ms <= 0:
            return 1.0
        ratio = ms / predicted_ms
        corrected = self._drift * ratio**DRIFT_SMOOTHING
        self._drift = min(max(corrected, DRIFT_MIN), DRIFT_MAX)
        return ratio


def fit(measured: Sequence[Measured]) -> Fit:
    """Fit the four coefficients; needs four batches or more, of different shapes.

    With four unknowns every set of positive ones can be tried: of the least-squares solutions without a negative
    coefficient the best is the non-negative least-squares solution (Lawson & Hanson, 1974, without the search).
    """
    assert len(measured) >= 4, "four coefficients need four batches"
    ms = np.array([point.ms for point in measured])
    features = np.array([_features(point.lengths) for point in measured]) / ms[:, None]
    target = np.ones(len(measured))
    best: npt.NDArray[np.float64] = np.zeros(4)
    best_error = float("inf")
    for chosen in _subsets(4):
        solution, *_ = np.linalg.lstsq(features[:, chosen], target, rcond=None)
        if (solution < 0).any():
            continue
        error = float(((features[:, chosen] @ solution - target) ** 2).sum())
        if error < best_error:
            best_error = error
            best = np.zeros(4)
            best[list(chosen)] = solution
    errors = np.abs(features @ best - target)
    return Fit(
        Coefficients(*(float(value) for value in best)),
        error_median=float(np.median(errors)),
        error_p95=float(np.quantile(errors, 0.95)),
    )


def calibration_batches(*, tokens_max: int, batch_tokens_max: int, batch_items_max: int) -> list[tuple[int, ...]]:
    """Batch shapes that tell the coefficients apart: alone and in company, short and long, even and mixed."""
    lengths = sorted({length for length in (4, 16, 64, 128, 256, 512, tokens_max) if length <= tokens_max})
    counts = (1, 4, 16, 64)
    even = [(length,) * count for length, count in itertools.product(lengths, counts)]
    mixed = [tuple(lengths) * count for count in (1, 2, 4)]
    return [shape for shape in [*even, *mixed] if sum(shape) <= batch_tokens_max and len(shape) <= batch_items_max] or [
        (lengths[0],)
    ]


def _predicted_ms(found: Coefficients, lengths: Sequence[int]) -> float:
    batch, tokens, squares, items = _features(lengths)
    return found.batch_ms * batch + found.token_ms * tokens + found.square_ms * squares + found.item_ms * items


def _features(lengths: Sequence[int]) -> tuple[float, float, float, float]:
    return 1.0, float(sum(lengths)), float(sum(length * length for length in lengths)), float(len(lengths))


def _subsets(size: int) -> list[list[int]]:
    return [list(chosen) for count in range(1, size + 1) for chosen in itertools.combinations(range(size), count)]
