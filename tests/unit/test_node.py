"""Gateway's dispatcher, queue and node in one process, on an in-process engine: a request from end to end."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from appliance.errors import BadVector, DeadlinePassed, EngineFailed, InvalidRequest, StartupError, Undeliverable
from appliance.gateway.dispatch import Dispatcher
from appliance.gateway.pending_calls import Result
from appliance.jobs import Embed, Job, Lane, Rows
from appliance.presets import Coefficients, Facts, Preset, Prompts, Tuning
from appliance.queue.memory import MemoryBroker
from appliance.settings import QueueSettings, WorkerSettings
from appliance.workers import revival
from appliance.workers.device import Place
from appliance.workers.engine_process import EngineRefused
from appliance.workers.node import Node, ServedModel
from appliance.workers.vector_space import VectorSpace
from tests.node_parts import Machine, until, word_tokenizer

WORDS = tuple(f"w{number}" for number in range(1, 100))  # the text `w7` is the one token 7
TUNING = Tuning(
    dtype="float32",
    batch_tokens_max=16,
    batch_items_max=8,
    batch_ms_max=16.0,
    max_wait_ms=0,
    handoff_ms=0,
    batches_ahead=2,
    backlog_batches=2,
    length_bands=(),
    engine_threads=1,
    cost=Coefficients(batch_ms=0.0, token_ms=1.0, square_ms=0.0, item_ms=0.0),
)


class Bench:
    """A dispatcher and one node per machine, over the queue in memory."""

    def __init__(self, *machines: Machine, drain_s: float = 5.0, settings: QueueSettings | None = None) -> None:
        self.broker = MemoryBroker(settings)
        self.dispatcher = Dispatcher(pending_requests_max=100, pending_bytes_max=10_000_000)
        self.machines = machines
        self.drain_s = drain_s
        self.stops = [asyncio.Event() for _ in machines]
        self.nodes: list[asyncio.Task[None]] = []
        self._count = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            gateway = await stack.enter_async_context(self.broker.gateway_queue(self.dispatcher))
            self.dispatcher.attach(gateway)
            self.nodes = [
                asyncio.create_task(self._serve(machine, stop))
                for machine, stop in zip(self.machines, self.stops, strict=True)
            ]
            try:
                yield
            finally:
                for stop in self.stops:
                    stop.set()
                await asyncio.wait_for(asyncio.gather(*self.nodes), 10)

    async def _serve(self, machine: Machine, stop: asyncio.Event) -> None:
        preset = Preset(Facts("m", prompts=Prompts()), TUNING, "cpu")
        async with self.broker.node_queue() as queue:
            node = Node(
                queue,
                models=[ServedModel(preset, Path("/models/m"), word_tokenizer(WORDS), VectorSpace("m"))],
                places=[Place("cpu", "cpu", 1, machine.engine_factory)],
                worker=WorkerSettings(tokenizer_threads=1, drain_s=self.drain_s),
                settings=self.broker.settings,
            )
            await node.run(stop)

    def ask(
        self, *chunks: Sequence[int], lane: Lane = "interactive", width: int | None = None, in_s: float = 30.0
    ) -> "asyncio.Task[list[Result]]":
        """One request, a job per chunk."""
        self._count += 1
        first = 0
        jobs = []
        for chunk in chunks:
            jobs.append(
                Job(
                    id=f"request{self._count}-{first}",
                    model="m",
                    task=Embed(inputs=tuple(f"w{number}" for number in chunk), width=width),
                    reply_to=self.dispatcher.reply_to,
                    deadline_s=time.time() + in_s,
                    first_index=first,
                    lane=lane,
                )
            )
            first += len(chunk)
        return asyncio.create_task(self.dispatcher.run(jobs))

    def is_empty(self) -> bool:
        """No job is stored any more, and the dispatcher waits for none."""
        return self.dispatcher.pending_requests == 0 and all(not lane._jobs for lane in self.broker.lanes.values())


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(revival, "RESTART_DELAY_S_MIN", 0.0)


def firsts_of(results: Sequence[Result]) -> list[float]:
    parts = [part for result in results for part in result.parts if isinstance(part, Rows)]
    rows = [np.frombuffer(part.data, dtype="<f4").reshape(-1, part.width) for part in parts]
    return [float(row[0]) for part in rows for row in part]


async def test_requests_are_answered_in_order_and_nothing_is_left() -> None:
    bench = Bench(Machine())
    async with bench.running():
        numbers = list(range(1, 61))
        calls = [bench.ask(numbers[:20], numbers[20:], lane=lane) for lane in ("interactive", "bulk") for _ in "12"]

        for results in await asyncio.gather(*calls):
            assert firsts_of(results) == [float(number) for number in numbers]
            assert sum(result.usage.input_tokens for result in results) == 60
        await until(bench.is_empty)

    batches = bench.machines[0].batches
    assert all(len(batch) <= TUNING.batch_items_max for batch in batches)
    assert sum(map(len, batches)) == 4 * 60


async def test_two_nodes_share_the_work() -> None:
    first, second = Machine(), Machine(is_held=True)
    bench = Bench(first, second)
    async with bench.running():
        await until(lambda: first.lives == second.lives == 1)
        calls = [bench.ask([number]) for number in range(1, 11)]
        await until(lambda: second.now is not None and second.now.outstanding > 0)
        second.release()
        answers = await asyncio.gather(*calls)

    assert [firsts_of(results) for results in answers] == [[float(number)] for number in range(1, 11)]
    assert first.batches
    assert second.batches


async def test_poison_fails_its_own_request_only() -> None:
    bench = Bench(Machine(killers=frozenset({13}), refused=frozenset({21}), not_finite=frozenset({34})))
    async with bench.running():
        good = [bench.ask([number, number + 1]) for number in (1, 3, 5, 7)]
        killer, refused, broken = bench.ask([2], [4, 13]), bench.ask([21]), bench.ask([8, 34])

        assert [firsts_of(results) for results in await asyncio.gather(*good)] == [[1, 2], [3, 4], [5, 6], [7, 8]]
        with pytest.raises(EngineFailed) as killed:
            await killer
        assert killed.value.param == "input[2]"
        with pytest.raises(EngineFailed, match="out of range"):
            await refused
        with pytest.raises(BadVector) as not_finite:
            await broken
        assert not_finite.value.param == "input[1]"
        await until(bench.is_empty)


async def test_a_width_that_the_model_does_not_give_is_refused() -> None:
    bench = Bench(Machine())
    async with bench.running():
        with pytest.raises(InvalidRequest) as caught:
            await bench.ask([1], width=3)
        assert caught.value.param == "dimensions"
        assert firsts_of(await bench.ask([1], width=2)) == [1.0]


async def test_late_and_cancelled_work_costs_no_device_time() -> None:
    machine = Machine(is_held=True)
    bench = Bench(machine)
    async with bench.running():
        blockers = [bench.ask([1]), bench.ask([2])]
        await until(lambda: machine.now is not None and machine.now.outstanding == 2)
        late, left = bench.ask([3], in_s=0.05), bench.ask([4])
        await until(lambda: bench.dispatcher.pending_requests == 4)
        left.cancel()
        with pytest.raises(DeadlinePassed):
            await late
        machine.release()
        await asyncio.gather(*blockers)
        await until(bench.is_empty)

    assert {number for batch in machine.batches for number in batch} == {1, 2}


async def test_a_node_that_stops_finishes_what_it_has() -> None:
    machine = Machine(is_held=True)
    bench = Bench(machine)
    async with bench.running():
        call = bench.ask([1])
        await until(lambda: machine.now is not None and machine.now.outstanding == 1)
        bench.stops[0].set()
        machine.release()
        assert firsts_of(await call) == [1.0]
        await asyncio.wait_for(bench.nodes[0], 5)


async def test_a_node_that_cannot_finish_gives_back_to_another() -> None:
    stuck, free = Machine(is_held=True), Machine()
    bench = Bench(stuck, free, drain_s=0.0)
    async with bench.running():
        await until(lambda: stuck.lives == free.lives == 1)
        calls = [bench.ask([number]) for number in range(1, 9)]
        await until(lambda: stuck.now is not None and stuck.now.outstanding > 0)
        bench.stops[0].set()

        answers = await asyncio.gather(*calls)

    assert [firsts_of(results) for results in answers] == [[float(number)] for number in range(1, 9)]
    assert stuck.batches == []


async def test_a_job_that_was_delivered_too_often_is_buried_and_told() -> None:
    bench = Bench(Machine(is_held=True), Machine(is_held=True), drain_s=0.0, settings=QueueSettings(deliveries_max=1))
    async with bench.running():
        call = bench.ask([1])
        holder = await _holder(bench)
        bench.stops[holder].set()

        with pytest.raises(Undeliverable, match="1 deliveries"):
            await call
        assert [letter.attempt for letter in bench.broker.dead_letters] == [2]


async def _holder(bench: Bench) -> int:
    """Which machine has the work."""

    def held() -> list[int]:
        return [n for n, machine in enumerate(bench.machines) if machine.now is not None and machine.now.outstanding]

    await until(lambda: bool(held()))
    return held()[0]


async def test_a_queue_that_was_lost_is_asked_again() -> None:
    machine = Machine(is_held=True)
    bench = Bench(machine)
    async with bench.running():
        call = bench.ask([1, 2])
        await until(lambda: machine.now is not None and machine.now.outstanding == 1)
        bench.broker.stop()
        machine.release()
        await until(lambda: machine.now is not None and machine.now.outstanding == 0)
        bench.broker.start()

        assert firsts_of(await call) == [1.0, 2.0]
        await until(bench.is_empty)


async def test_a_stop_while_models_load_is_heeded() -> None:
    machine = Machine(load_is_held=True)
    bench = Bench(machine)
    async with bench.running():
        await until(lambda: machine.lives == 1)
        bench.stops[0].set()
        await asyncio.wait_for(bench.nodes[0], 5)

    assert machine.now is not None
    assert (await machine.now.died()).message == "the engine died"


async def test_a_model_that_cannot_be_loaded_ends_the_node() -> None:
    bench = Bench(Machine(load_fault=EngineRefused("no such architecture")))

    with pytest.raises(ExceptionGroup) as caught:
        await bench._serve(bench.machines[0], bench.stops[0])
    assert caught.group_contains(StartupError, match="no such architecture")


async def test_a_first_job_that_is_late_does_not_stop_the_pull() -> None:
    """The node knows no job's size yet, and wishes for one at a time."""
    bench = Bench(Machine())
    async with bench.running():
        with pytest.raises(DeadlinePassed):
            await bench.ask([1], in_s=-1.0)

        assert firsts_of(await asyncio.wait_for(bench.ask([2]), 5)) == [2.0]
