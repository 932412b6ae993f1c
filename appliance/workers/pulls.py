"""The standing pulls of a node: one a model and lane, told whenever something changed how much is wanted."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

from appliance.jobs import Lane
from appliance.queue.base import Delivery, NodeQueue, Pull
from appliance.queue.streams import LANES

_log = logging.getLogger(__name__)


class Pulls:
    """Of the models of one node."""

    def __init__(
        self,
        queue: NodeQueue,
        models: Sequence[str],
        *,
        deliver: Callable[[str, Delivery], None],
        wish: Callable[[str, Lane], int | None],
    ) -> None:
        """`deliver(model, delivery)` gets what comes. `wish(model, lane)` says how many jobs to ask for.

        None is more than too many: what was asked for is taken back.
        """
        self._queue = queue
        self._models = models
        self._deliver = deliver
        self._wish = wish
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """What `wish` says may be another now."""
        self._changed.set()

    async def run(self, stop: asyncio.Event) -> None:
        """Keep the queue told, until `stop`; then ask for nothing, and hear what was still under way."""
        async with AsyncExitStack() as stack:
            pulls: dict[tuple[str, Lane], Pull] = {}
            for model in self._models:
                for lane in LANES:
                    opened = self._queue.pull(model=model, lane=lane, on_delivery=partial(self._deliver, model))
                    pulls[model, lane] = await stack.enter_async_context(opened)
            _log.info("serving %s", ", ".join(self._models))
            stopping = asyncio.create_task(self._wake_at(stop))
            try:
                while not stop.is_set():
                    self._changed.clear()
                    for (model, lane), pull in pulls.items():
                        wish = self._wish(model, lane)
                        if wish is None:
                            await pull.recall()
                        else:
                            await pull.want(wish)
                    await self._changed.wait()
            finally:
                stopping.cancel()
            for pull in pulls.values():
                await pull.want(0)

    async def settled(self, is_settled: Callable[[], bool], *, within_s: float) -> bool:
        """Wait for a change that makes `is_settled` true; False when it takes too long."""
        try:
            async with asyncio.timeout(within_s):
                while not is_settled():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    async def _wake_at(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._changed.set()
