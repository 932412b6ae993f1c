"""Fits a model's costs when it is loaded, in seconds, on the device that will serve it."""

import logging
import time
from collections.abc import Awaitable, Callable, Sequence

import numpy as np

from appliance import telemetry
from appliance.errors import EngineFailed
from appliance.workers.cost import CostModel, Measured, fit
from appliance.workers.tokens import Tokens

TEXT = "a node asks for the work that it can start soon, and answers straight back to whoever sent it"
BATCHES_MIN = 4  # as many as there are coefficients
ROUNDS_MAX = 3  # the fastest of the rounds counts: what disturbs only ever slows

_log = logging.getLogger(__name__)


async def calibrate(
    model: str,
    cost: CostModel,
    *,
    measure: Callable[[bytes, Sequence[int]], Awaitable[float]],
    shapes: Sequence[tuple[int, ...]],
    sample: Tokens,
    budget_s: float,
) -> None:
    """Measure batches of these shapes, smallest first, for about `budget_s`, and fit `cost` to them.

    `measure` runs a batch and returns its milliseconds; `sample` lends the token ids. Leaves `cost` as it is, to be
    corrected by real batches, when fewer than four could be measured.
    """
    started_s = time.monotonic()
    best: dict[tuple[int, ...], float] = {}
    try:
        for _ in range(ROUNDS_MAX):
            for shape in sorted(shapes, key=sum):
                if len(best) >= BATCHES_MIN and time.monotonic() - started_s > budget_s:
                    break
                ms = await measure(_ids(sample, sum(shape)), shape)
                best[shape] = min(ms, best.get(shape, ms))
    except EngineFailed as error:
        _log.warning("the costs of %s were not measured to the end: %s", model, error.message)
    if len(best) < BATCHES_MIN or min(best.values()) <= 0:
        return
    found = fit([Measured(shape, ms) for shape, ms in best.items()])
    cost.replace(found.coefficients)
    telemetry.COST_ERROR.labels(model, "0.5").set(found.error_median)
    telemetry.COST_ERROR.labels(model, "0.95").set(found.error_p95)
    _log.info(
        "%s costs %.2f ms a batch, %.4f ms a token, %.2f us a squared token, %.3f ms a text; median error %.0f %%",
        model,
        found.coefficients.batch_ms,
        found.coefficients.token_ms,
        1000 * found.coefficients.square_ms,
        found.coefficients.item_ms,
        100 * found.error_median,
    )


def _ids(sample: Tokens, count: int) -> bytes:
    """So many ids, from a text the model can read."""
    return np.resize(np.frombuffer(sample.ids, dtype="<i4"), count).astype("<i4").tobytes()
