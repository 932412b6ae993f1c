"""One device: keeps an engine process alive on it, feeds it batches, and decides what a failed batch becomes."""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from appliance import telemetry
from appliance.errors import ApplianceError, EngineFailed, StartupError
from appliance.workers.batcher import Batcher
from appliance.workers.engine_process import EngineDied, EngineOutOfMemory, EngineProcess
from appliance.workers.open_job import Item
from appliance.workers.split import FaultKind, after_fault
from appliance.workers.wire import Encoded, Load, Loaded

RESTART_DELAY_S_MIN = 0.1
RESTART_DELAY_S_MAX = 30.0
STEADY_S = 60.0  # an engine that lived this long starts the delays anew
FIRST_STARTS_MAX = 3  # an engine that was never ready by then is broken, not unlucky

_log = logging.getLogger(__name__)

EngineFactory = Callable[[], AbstractAsyncContextManager[EngineProcess]]


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
    """Feeds the batches of every resident model to one engine process. Several devices may share the batchers."""

    def __init__(
        self,
        name: str,
        *,
        engine_factory: EngineFactory,
        orders: Sequence[Load],
        batchers: Mapping[str, Batcher[Item]],
        batches_ahead: Mapping[str, int],
        sink: Sink,
    ) -> None:
        """`orders` make the models resident after each start; `batchers` and `batches_ahead` go by model."""
        self.name = name
        self.loaded: asyncio.Future[list[Loaded]] = asyncio.get_running_loop().create_future()
        self._engine_factory = engine_factory
        self._orders = orders
        self._batchers = batchers
        self._batches_ahead = batches_ahead
        self._sink = sink
        self._in_flight = 0
        self._is_dead = False
        self._changed = asyncio.Event()

    def wake(self) -> None:
        """Something was added to a batcher."""
        self._changed.set()

    async def run(self) -> None:
        """Start the engine, feed it, start it again when it dies, until cancelled.

        Raises StartupError when a model cannot be loaded, or when the engine never comes up: that would happen again.
        """
        delay_s = RESTART_DELAY_S_MIN
        for starts in itertools.count(1):
            started_s = time.monotonic()
            try:
                async with self._engine_factory() as engine:
                    telemetry.ENGINE_STARTS.labels(self.name).inc()
                    await self._load(engine)
                    await self._feed(engine)
            except EngineDied as death:
                if not self.loaded.done() and starts >= FIRST_STARTS_MAX:
                    last_words = " | ".join(death.stderr_tail[-3:])
                    raise StartupError(
                        f"the engine of {self.name} does not come up: {death.message}: {last_words}"
                    ) from death
                _log.error("device %s: %s; it is started again in %.1f s", self.name, death.message, delay_s)
            await asyncio.sleep(delay_s)
            is_steady = time.monotonic() - started_s > STEADY_S
            delay_s = RESTART_DELAY_S_MIN if is_steady else min(2 * delay_s, RESTART_DELAY_S_MAX)

    async def _load(self, engine: EngineProcess) -> None:
        loaded: list[Loaded] = []
        for order in self._orders:
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

    async def _feed(self, engine: EngineProcess) -> None:
        """Hand out batches until the engine dies."""
        self._is_dead = False
        async with asyncio.TaskGroup() as batches:
            batches.create_task(self._watch(engine))
            while not self._is_dead:
                model = self._due_model(time.monotonic())
                if model is None:
                    await self._wait_for_change()
                    continue
                batch, dead = self._batchers[model].next_batch(self._sink.is_live)
                if dead:
                    await self._sink.drop(dead)
                if batch:
                    self._in_flight += 1
                    batches.create_task(self._run(engine, model, batch))
        raise await engine.died()

    async def _watch(self, engine: EngineProcess) -> None:
        """An idle engine that dies is noticed too."""
        await engine.died()
        self._is_dead = True
        self._changed.set()

    def _due_model(self, now_s: float) -> str | None:
        """The model whose batch should leave now; of several, the one whose oldest item has waited longest."""
        due = [model for model, batcher in self._batchers.items() if self._is_due(model, batcher, now_s)]
        return min(due, key=lambda model: self._batchers[model].oldest_s, default=None)

    def _is_due(self, model: str, batcher: Batcher[Item], now_s: float) -> bool:
        if batcher.items_waiting == 0 or self._in_flight >= self._batches_ahead[model]:
            return False
        return self._in_flight == 0 or batcher.is_full() or batcher.due_s() <= now_s

    async def _wait_for_change(self) -> None:
        """Until something was added or computed, or until a waiting item is due beside a running batch."""
        self._changed.clear()
        due_s = min(
            (
                batcher.due_s()
                for model, batcher in self._batchers.items()
                if self._in_flight < self._batches_ahead[model]
            ),
            default=float("inf"),
        )
        if due_s == float("inf"):
            await self._changed.wait()
            return
        try:
            async with asyncio.timeout(max(0.0, due_s - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _run(self, engine: EngineProcess, model: str, batch: list[Item]) -> None:
        ids = b"".join(item.ids for item in batch)
        lengths = [item.tokens for item in batch]
        telemetry.BATCH_ITEMS.labels(model).observe(len(batch))
        telemetry.BATCH_TOKENS.labels(model).observe(sum(lengths))
        try:
            encoded = await engine.encode(model, ids, lengths)
        except EngineFailed as error:
            await self._salvage(model, batch, error)
        else:
            telemetry.BATCHES.labels(model, "done").inc()
            telemetry.DEVICE_SECONDS.labels(model).inc(encoded.device_s)
            await self._sink.take(batch, encoded)
        finally:
            self._in_flight -= 1
            self._changed.set()

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
        self._batchers[model].form(parts)


def _kind(error: EngineFailed) -> FaultKind:
    if isinstance(error, EngineDied):
        return "died" if error.was_begun else "lost"
    if isinstance(error, EngineOutOfMemory):
        return "oom"
    return "refused"
