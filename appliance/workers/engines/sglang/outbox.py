"""What the adapter has to say to the node, gathered into frames.

The streams of all sequences come one by one; what has come together leaves as one `Step`. A node that reads slowly
holds up the streams, as `put` waits when much is unsent.
"""

import asyncio
from collections.abc import Iterable
from typing import Final

from appliance.workers import wire
from appliance.workers.wire import FromEngine, Grown, Step

UNSENT_MAX: Final = 1024  # of `Grown`


class Outbox:
    """One writer of frames. `run` sends; everything else only notes."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._unsent: list[Grown] = []
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._since: float | None = None  # the last step, or when work began after a pause
        self._running: set[int] = set()  # sequences that have grown and go on
        self._waiting: set[int] = set()  # sequences that have not grown yet

    def say(self, message: FromEngine) -> None:
        """At once, before what is unsent."""
        self._writer.write(wire.frame(message))

    def begun(self, sequence: int) -> None:
        """It counts as waiting until it grows."""
        if not self._running and not self._waiting:
            self._since = asyncio.get_running_loop().time()
        self._waiting.add(sequence)

    async def put(self, grown: Grown) -> None:
        """Note it for the next step; waits while too much is unsent."""
        while not self._room.is_set():
            await self._room.wait()
        self._waiting.discard(grown.sequence)
        if grown.finish:
            self._running.discard(grown.sequence)
        else:
            self._running.add(grown.sequence)
        self._unsent.append(grown)
        self._wake.set()
        if len(self._unsent) >= UNSENT_MAX:
            self._room.clear()

    def forget(self, sequences: Iterable[int]) -> None:
        """Nothing more is said of these."""
        dead = frozenset(sequences)
        self._unsent = [grown for grown in self._unsent if grown.sequence not in dead]
        self._running -= dead
        self._waiting -= dead

    async def run(self) -> None:
        """Send, until cancelled. Raises ConnectionError when the node is gone."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wake.wait()
            self._wake.clear()
            await asyncio.sleep(0)  # what other streams have by now goes along
            grown, self._unsent = self._unsent, []
            self._room.set()
            if not grown:
                continue
            now = loop.time()
            device_s = now - (self._since if self._since is not None else now)
            self._since = now
            self._writer.write(wire.frame(Step(tuple(grown), device_s, len(self._running), len(self._waiting))))
            await self._writer.drain()
