"""A device: feeds its engine, saves every neighbour of what fails, and starts the engine again."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from appliance.errors import ApplianceError, EngineFailed, StartupError
from appliance.presets import Coefficients
from appliance.workers import revival
from appliance.workers.batcher import Batcher, Budget
from appliance.workers.cost import CostModel
from appliance.workers.device import Device, Place, Served
from appliance.workers.engine_process import EngineRefused
from appliance.workers.exchange import Exchange
from appliance.workers.open_job import Item
from appliance.workers.wire import Encoded, Load
from tests.node_parts import Machine, items_of, until

ORDER = Load(model="m", folder="/models/m", dtype="float32", device="cpu", threads=1)


class RecordingSink:
    """Keeps what came of every item, by the id of its text."""

    def __init__(self) -> None:
        self.answered: dict[int, float] = {}
        self.failed: dict[int, ApplianceError] = {}
        self.dropped: list[int] = []
        self.dead: set[int] = set()

    def is_live(self, item: Item) -> bool:
        return first_of(item) not in self.dead

    async def take(self, batch: Sequence[Item], encoded: Encoded) -> None:
        rows = np.frombuffer(encoded.rows, dtype="<f4").reshape(len(batch), encoded.width)
        for item, row in zip(batch, rows, strict=True):
            assert first_of(item) not in self.answered, "an item was answered twice"
            self.answered[first_of(item)] = float(row[0])

    async def drop(self, items: Sequence[Item]) -> None:
        self.dropped += [first_of(item) for item in items]

    async def fail(self, item: Item, error: ApplianceError) -> None:
        self.failed[first_of(item)] = error


def first_of(item: Item) -> int:
    return int(np.frombuffer(item.content.ids, dtype="<i4")[0])


class Bench:
    """One device on an in-process engine."""

    def __init__(self, machine: Machine, *, ahead: int = 2, items_max: int = 8, max_wait_s: float = 0.0) -> None:
        self.machine = machine
        self.sink = RecordingSink()
        self.batcher: Batcher[Item] = Batcher(Budget(1000, items_max, 1e9, max_wait_s))
        served = Served(
            order=ORDER,
            batcher=self.batcher,
            cost=CostModel(Coefficients(1.0, 1.0, 0.0, 0.0)),
            batches_ahead=ahead,
            handoff_s=-1e9,  # never early: when a batch leaves is told by the clock's other rules
        )
        place = Place("cpu", "cpu", 1, machine.engine_factory)
        self.device = Device(place, models={"m": served}, exchange=Exchange(), sink=self.sink)

    def add(self, *ids: int) -> None:
        for item in items_of(*ids):
            self.batcher.add(item)
        self.device.wake()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.device.run())
        try:
            yield
        finally:
            if not task.done():
                task.cancel()
            await asyncio.wait({task})
            if not task.cancelled():
                task.result()

    async def until_settled(self, count: int) -> None:
        sink = self.sink
        await until(lambda: len(sink.answered) + len(sink.failed) + len(sink.dropped) >= count)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revival, "RESTART_DELAY_S_MIN", 0.0)


async def test_items_are_computed_and_the_model_is_declared() -> None:
    bench = Bench(Machine())
    bench.add(1, 2, 3)
    async with bench.running():
        await bench.until_settled(3)
        (card,) = await bench.device.loaded

    assert bench.sink.answered == {1: 1.0, 2: 2.0, 3: 3.0}
    assert bench.machine.batches == [[1, 2, 3]]
    assert (card.model, card.width) == ("m", bench.machine.width)


async def test_an_idle_device_takes_what_comes_at_once() -> None:
    bench = Bench(Machine(), max_wait_s=1000.0)
    async with bench.running():
        await bench.device.loaded
        bench.add(1)
        await bench.until_settled(1)

    assert bench.machine.batches == [[1]]


async def test_batches_are_handed_over_ahead_but_no_further() -> None:
    bench = Bench(Machine(is_held=True), items_max=1)
    bench.add(1, 2, 3, 4)
    async with bench.running():
        await until(lambda: bench.machine.now is not None and bench.machine.now.outstanding == 2)
        assert bench.batcher.items_waiting == 2
        bench.machine.release()
        await bench.until_settled(4)

    assert bench.machine.batches == [[1], [2], [3], [4]]


async def test_a_part_batch_waits_for_company_while_the_device_is_busy() -> None:
    bench = Bench(Machine(is_held=True), items_max=2, max_wait_s=1e10)
    bench.add(1)
    async with bench.running():
        await until(lambda: bench.machine.now is not None and bench.machine.now.outstanding == 1)
        bench.add(2)
        await until(lambda: not bench.device._changed.is_set())
        assert bench.batcher.items_waiting == 1  # not full and not due
        bench.add(3)
        await until(lambda: bench.batcher.items_waiting == 0)
        bench.machine.release()
        await bench.until_settled(3)

    assert bench.machine.batches == [[1], [2, 3]]


async def test_dead_items_cost_no_device_time() -> None:
    bench = Bench(Machine())
    bench.sink.dead = {1, 3}
    bench.add(1, 2, 3)
    async with bench.running():
        await bench.until_settled(3)

    assert (bench.machine.batches, bench.sink.dropped) == ([[2]], [1, 3])


async def test_a_batch_out_of_memory_is_halved_until_it_fits() -> None:
    bench = Bench(Machine(tokens_before_oom=2))
    bench.add(*range(1, 8))
    async with bench.running():
        await bench.until_settled(7)

    assert sorted(bench.sink.answered) == list(range(1, 8))
    assert bench.machine.lives == 1


async def test_an_item_out_of_memory_by_itself_fails_alone() -> None:
    bench = Bench(Machine(tokens_before_oom=0))
    bench.add(1)
    async with bench.running():
        await bench.until_settled(1)

    assert isinstance(bench.sink.failed[1], EngineFailed)


async def test_a_refused_item_is_found_and_its_neighbours_are_answered() -> None:
    bench = Bench(Machine(refused=frozenset({5})))
    bench.add(*range(1, 9))
    async with bench.running():
        await bench.until_settled(8)

    assert list(bench.sink.failed) == [5]
    assert sorted(bench.sink.answered) == [1, 2, 3, 4, 6, 7, 8]
    assert len(bench.machine.batches) == 7
    assert bench.machine.lives == 1


@pytest.mark.parametrize("ahead", [1, 2, 4])
@pytest.mark.parametrize("killer", [1, 4, 8, 11, 16])
async def test_an_item_that_kills_the_engine_fails_alone(ahead: int, killer: int) -> None:
    bench = Bench(Machine(killers=frozenset({killer})), ahead=ahead)
    bench.add(*range(1, 17))
    async with bench.running():
        await bench.until_settled(16)

    assert list(bench.sink.failed) == [killer]
    assert sorted(bench.sink.answered) == [number for number in range(1, 17) if number != killer]
    # Once among others and once alone; then one life for the rest, unless it was the last to run.
    assert sum(killer in batch for batch in bench.machine.batches) == 2
    assert bench.machine.lives in {2, 3}


async def test_several_killers_fail_and_nobody_else() -> None:
    killers = frozenset({2, 3, 9})
    bench = Bench(Machine(killers=killers), ahead=3)
    bench.add(*range(1, 17))
    async with bench.running():
        await bench.until_settled(16)

    assert set(bench.sink.failed) == killers
    assert sorted(bench.sink.answered) == [number for number in range(1, 17) if number not in killers]


async def test_a_lone_item_is_given_a_second_engine() -> None:
    machine = Machine(is_held=True)
    bench = Bench(machine)
    bench.add(1)
    async with bench.running():
        await until(lambda: machine.now is not None and machine.now.outstanding == 1)
        assert machine.now is not None
        machine.now.die()  # of something else
        machine.release()
        await bench.until_settled(1)

    assert bench.sink.answered == {1: 1.0}
    assert machine.lives == 2


async def test_an_engine_that_dies_idle_is_started_again() -> None:
    bench = Bench(Machine())
    async with bench.running():
        await bench.device.loaded
        assert bench.machine.now is not None
        bench.machine.now.die()
        await until(lambda: bench.machine.lives == 2)
        bench.add(1)
        await bench.until_settled(1)

    assert bench.sink.answered == {1: 1.0}


async def test_an_engine_may_fail_to_come_up_twice() -> None:
    bench = Bench(Machine(deaths_at_start=2))
    bench.add(1)
    async with bench.running():
        await bench.until_settled(1)

    assert bench.machine.lives == 3


async def test_an_engine_that_never_comes_up_stops_the_start() -> None:
    bench = Bench(Machine(deaths_at_start=99))

    with pytest.raises(StartupError, match=r"does not come up.*its last words"):
        await bench.device.run()
    assert bench.machine.lives == revival.FIRST_STARTS_MAX
    assert not bench.device.loaded.done()


async def test_a_model_that_cannot_be_loaded_stops_the_start() -> None:
    bench = Bench(Machine(load_fault=EngineRefused("no such architecture")))

    with pytest.raises(StartupError, match="model m cannot be loaded on cpu: no such architecture"):
        await bench.device.run()


async def test_a_stopped_device_ends_its_engine() -> None:
    machine = Machine(is_held=True)
    bench = Bench(machine)
    bench.add(1)
    async with bench.running():
        await until(lambda: machine.now is not None and machine.now.outstanding == 1)

    assert machine.now is not None
    assert machine.now.outstanding == 0
    assert (bench.sink.answered, bench.sink.failed) == ({}, {})
