"""Costs are fitted when a model is loaded, within their time; one that cannot be measured is served all the same."""

from collections.abc import Sequence

import pytest

from appliance.errors import EngineFailed
from appliance.presets import Coefficients
from appliance.workers.calibration import calibrate
from appliance.workers.cost import UNKNOWN, CostModel, calibration_batches
from tests.node_parts import tokens_of

TRUE = Coefficients(batch_ms=3.0, token_ms=0.05, square_ms=0.0001, item_ms=0.2)
SHAPES = calibration_batches(tokens_max=256, batch_tokens_max=4096, batch_items_max=256)


class Engine:
    """Takes exactly what `TRUE` says, and fails at its `fails_at`th batch."""

    def __init__(self, *, fails_at: int = 10**9) -> None:
        self.batches: list[tuple[int, ...]] = []
        self._fails_at = fails_at

    async def measure(self, ids: bytes, lengths: Sequence[int]) -> float:
        assert len(ids) == 4 * sum(lengths)
        self.batches.append(tuple(lengths))
        if len(self.batches) >= self._fails_at:
            raise EngineFailed("no more")
        return CostModel(TRUE).batch_ms(lengths)


async def run(engine: Engine, *, budget_s: float) -> CostModel:
    cost = CostModel(UNKNOWN)
    await calibrate("m", cost, measure=engine.measure, shapes=SHAPES, sample=tokens_of(1, 2, 3), budget_s=budget_s)
    return cost


async def test_the_costs_are_found() -> None:
    cost = await run(Engine(), budget_s=60)

    for shape in SHAPES:
        assert cost.batch_ms(shape) == pytest.approx(CostModel(TRUE).batch_ms(shape), rel=1e-3)


async def test_without_time_the_least_is_measured() -> None:
    engine = Engine()
    cost = await run(engine, budget_s=0)

    assert len(engine.batches) == 4
    assert cost.coefficients != UNKNOWN


@pytest.mark.parametrize("fails_at", [1, 4])
async def test_a_failing_engine_leaves_the_costs_unknown(fails_at: int) -> None:
    cost = await run(Engine(fails_at=fails_at), budget_s=60)

    assert cost.coefficients == UNKNOWN


async def test_what_was_measured_before_a_failure_counts() -> None:
    cost = await run(Engine(fails_at=20), budget_s=60)

    assert cost.batch_ms(SHAPES[0]) == pytest.approx(CostModel(TRUE).batch_ms(SHAPES[0]), rel=0.05)
