"""One device: keeps an engine process alive on it, feeds it batches, and decides what a failed batch becomes."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NoReturn, Protocol

import msgspec

from appliance import telemetry
from appliance.errors import ApplianceError, EngineFailed, StartupError
from appliance.workers.batcher import Batcher
from appliance.workers.cost import CostModel
from appliance.workers.engine_process import EngineDied, EngineOutOfMemory, EngineProcess
from appliance.workers.exchange import Exchange
from appliance.workers.open_job import Item
from appliance.workers.revival import kept_alive
from appliance.workers.split import FaultKind, after_fault
from appliance.workers.wire import Encoded, Load, Loaded

_log = logging.getLogger(__name__)

EngineFactory = Callable[[], AbstractAsyncContextManager[EngineProcess]]


class Place(msgspec.Struct, frozen=True):
    """Where an engine runs. Several may share a device: a CPU's cores are shared out among engines."""

    name: str  # for metrics and logs: "cpu/0", "cuda:1"
    device: str  # torch's name: "cpu", "cuda:1"
    threads: int  # of a CPU engine
    engine_factory: EngineFactory


class Served(msgspec.Struct, frozen=True):
    """What a device needs to know of one model: how to load it, what waits for it, what that costs, when to run it."""

    order: Load
    batcher: Batcher[Item]
    cost: CostModel
    batches_ahead: int
    handoff_s: float


class Sink(Protocol):
    """Where a device's results go, and who knows whether they are still wanted."""

    def is_live(self, item: Item) -> bool:
        """Whether the item is still worth computing."""

    async def take(self, batch: Sequence[Item], encoded: Encoded) -> None:
        """A batch was computed."""

    async def drop(self, items: Sequence[Item]) -> None:
        """Items were found dead on their way to the device."""

    async def fail(self, item: Item, error: ApplianceError) -> None:
        """The item is at fault by itself; its job fails."""


class Device:
    """Feeds the batches of every resident model to one engine process. Several devices share the batchers."""

    def __init__(self, place: Place, *, models: Mapping[str, Served], exchange: Exchange, sink: Sink) -> None:
        """`models` become resident after each start; the `exchange` says which device takes what waits."""
        self.name = place.name
        self.loaded: asyncio.Future[list[Loaded]] = asyncio.get_running_loop().create_future()
        self._place = place
        self._models = models
        self._exchange = exchange
        self._sink = sink
        self._engine: EngineProcess | None = None
        self._in_flight = 0
        self._is_dead = False
        self._changed = asyncio.Event()
        self._neighbours: Sequence[Device] = (self,)

    def meet(self, devices: "Sequence[Device]") -> None:
        """The devices that take from the same batchers, this one included: each wakes the others when it changes."""
        self._neighbours = devices

    def wake(self) -> None:
        """Something was added to a batcher."""
        self._changed.set()

    async def run(self) -> None:
        """Start the engine, feed it, start it again when it dies, until cancelled.

        Raises StartupError when a model cannot be loaded, or when the engine never comes up: that would happen again.
        """
        await kept_alive(self.name, self._place.engine_factory, self._serve, was_ready=self.loaded.done)

    async def _serve(self, engine: EngineProcess) -> NoReturn:
        try:
            await self._load(engine)
            self._engine = engine
            self._exchange.join(self.name)
            await self._feed(engine)
        finally:
            self._engine = None
            self._exchange.leave(self.name)
            self._wake_all()

    async def _load(self, engine: EngineProcess) -> None:
        loaded: list[Loaded] = []
        for order in (model.order for model in self._models.values()):
            try:
                card = await engine.load(order)
            except EngineDied:
                raise
            except EngineFailed as error:
                raise StartupError(f"model {order.model} cannot be loaded on {self.name}: {error.message}") from error
            telemetry.RESIDENT_BYTES.labels(order.model, self.name).set(card.weights_bytes)
            _log.info("%s is resident on %s after %.1f s, %s", order.model, self.name, card.load_s, card.dtype)
            loaded.append(card)
        if not self.loaded.done():
            self.loaded.set_result(loaded)

    async def measure(self, model: str, ids: bytes, lengths: Sequence[int]) -> float:
        """Run a batch that nobody asked for, and return its device time in milliseconds. Raises EngineFailed."""
        assert self._engine is not None, "measured before it is loaded"
        return (await self._engine.encode(model, ids, lengths)).device_s * 1000

    async def _feed(self, engine: EngineProcess) -> NoReturn:
        """Hand out batches until the engine dies. Raises EngineDied."""
        self._is_dead = False
        self._in_flight = 0
        async with asyncio.TaskGroup() as batches:
            batches.create_task(self._watch(engine))
            while not self._is_dead:
                model = self._due_model(time.monotonic())
                if model is None:
                    await self._wait_for_change()
                    continue
                batch, dead = self._models[model].batcher.next_batch(self._sink.is_live)
                if dead:
                    await self._sink.drop(dead)
                if batch:
                    self._send(batches, engine, model, batch)
        raise await engine.died()

    def _send(self, batches: asyncio.TaskGroup, engine: EngineProcess, model: str, batch: list[Item]) -> None:
        predicted_ms = self._models[model].cost.batch_ms([item.tokens for item in batch])
        self._exchange.sent(self.name, predicted_ms / 1000, now_s=time.monotonic())
        self._in_flight += 1
        batches.create_task(self._run(engine, model, batch))

    async def _watch(self, engine: EngineProcess) -> None:
        """An idle engine that dies is noticed too."""
        await engine.died()
        self._is_dead = True
        self._changed.set()

    def _due_model(self, now_s: float) -> str | None:
        """The model whose batch should leave now; of several, the one whose oldest item has waited longest."""
        due = [model for model, served in self._models.items() if self._leaves_s(served, now_s) <= now_s]
        return min(due, key=lambda model: self._models[model].batcher.oldest_s, default=None)

    def _leaves_s(self, served: Served, now_s: float) -> float:
        """When this device should take a batch of the model; infinity unless something changes."""
        batcher = served.batcher
        if batcher.items_waiting == 0 or self._in_flight >= served.batches_ahead:
            return float("inf")
        waiting_s, batch_s = batcher.cost_waiting_ms / 1000, batcher.batch_cost_ms / 1000
        if not self._exchange.takes(self.name, batch_s=batch_s, waiting_s=waiting_s, now_s=now_s):
            return float("inf")
        if self._in_flight == 0 or batcher.is_full():
            return now_s
        # On a busy device waiting gains company and costs nothing, until it is about to be free.
        return min(batcher.due_s(), self._exchange.free_s(self.name) - served.handoff_s)

    async def _wait_for_change(self) -> None:
        """Until something was added or computed, or until a waiting item is due beside a running batch."""
        self._changed.clear()
        now_s = time.monotonic()
        leaves_s = min((self._leaves_s(served, now_s) for served in self._models.values()), default=float("inf"))
        if leaves_s == float("inf"):
            await self._changed.wait()
            return
        timer = asyncio.get_running_loop().call_later(max(0.0, leaves_s - now_s), self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    async def _run(self, engine: EngineProcess, model: str, batch: list[Item]) -> None:
        ids = b"".join(item.content.ids for item in batch)
        task = self._models[model].order.task
        lengths = [item.tokens for item in batch]
        telemetry.BATCH_ITEMS.labels(model).observe(len(batch))
        telemetry.BATCH_TOKENS.labels(model).observe(sum(lengths))
        measured_s: float | None = None
        try:
            encoded = await engine.encode(
                model,
                ids,
                lengths,
                _second_starts(batch),
                per_token=_per_token(batch) if task == "embed" else (),
                texts=[item.content.text for item in batch] if task == "parse" else (),
            )
            measured_s = encoded.device_s
        except EngineFailed as error:
            self._done(measured_s)
            await self._salvage(model, batch, error)
        else:
            self._done(measured_s)
            ratio = self._models[model].cost.learn(lengths, measured_s * 1000)
            telemetry.BATCH_RATIO.labels(model).observe(ratio)
            telemetry.BATCHES.labels(model, "done").inc()
            telemetry.DEVICE_SECONDS.labels(model, self.name).inc(measured_s)
            await self._sink.take(batch, encoded)
        finally:
            self._wake_all()

    def _done(self, measured_s: float | None) -> None:
        """A batch is back, and its place is free for the next before its answers are written."""
        self._exchange.done(self.name, now_s=time.monotonic(), measured_s=measured_s)
        self._in_flight -= 1
        self._changed.set()

    def _wake_all(self) -> None:
        for device in self._neighbours:
            device.wake()

    async def _salvage(self, model: str, batch: list[Item], error: EngineFailed) -> None:
        """Put a failed batch back in parts, or fail its one item."""
        kind = _kind(error)
        telemetry.BATCHES.labels(model, kind).inc()
        parts = after_fault(batch, kind, was_alone=batch[0].was_alone)
        if not parts:
            _log.error("one input of %s fails alone: %s", model, error.message)
            await self._sink.fail(batch[0], error)
            return
        if kind == "died":
            for item in batch:
                item.was_alone = True
        self._models[model].batcher.form(parts)


def _second_starts(batch: Sequence[Item]) -> tuple[int, ...]:
    """Where each pair's second text begins; nothing where no input is a pair."""
    starts = tuple(item.content.second_start for item in batch)
    return starts if any(starts) else ()


def _per_token(batch: Sequence[Item]) -> tuple[int, ...]:
    """Where the items are whose tokens' vectors are wanted."""
    return tuple(position for position, item in enumerate(batch) if item.content.rows == "per_token")


def _kind(error: EngineFailed) -> FaultKind:
    if isinstance(error, EngineDied):
        return "died" if error.was_begun else "lost"
    if isinstance(error, EngineOutOfMemory):
        return "oom"
    return "refused"
