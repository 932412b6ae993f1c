"""The node's client of an engine process that writes texts: begin and abort sequences, hear of their steps."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

from appliance.workers import wire
from appliance.workers.engine_process import EngineProcess
from appliance.workers.wire import Abort, Adapters, Begin, FromEngine, LoadAdapter, Step, UnloadAdapter

# An engine gives up sooner, and says so; unloading waits for texts to end.
ADAPTER_TIMEOUT_S: Final = 400.0


class TextEngineProcess(EngineProcess):
    """See `EngineProcess`. One that is silent for `batch_timeout_s` while it has sequences is taken for hung."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        sockets_dir: Path,
        start_timeout_s: float,
        batch_timeout_s: float,
    ) -> None:
        super().__init__(
            command,
            name=name,
            sockets_dir=sockets_dir,
            start_timeout_s=start_timeout_s,
            batch_timeout_s=batch_timeout_s,
        )
        self._silence_s = batch_timeout_s
        self._begun: set[int] = set()
        self._deadline: asyncio.TimerHandle | None = None
        self._on_step: Callable[[Step], Awaitable[None]] | None = None

    def listen(self, on_step: Callable[[Step], Awaitable[None]]) -> None:
        """`on_step` gets every step. While it has not returned no other is read, which in the end stops the engine."""
        self._on_step = on_step

    def begin(self, begin: Begin) -> None:
        """The caller bounds how many are begun at once. Where the process is dead, that is heard of by `died`."""
        self._begun.add(begin.sequence)
        if self._deadline is None:
            self._expect_a_step()
        self._send(wire.frame(begin))

    def abort(self, sequences: Iterable[int]) -> None:
        """Nothing more is heard of these."""
        numbers = tuple(sequences)
        self._begun.difference_update(numbers)
        self._expect_a_step()
        self._send(wire.frame(Abort(numbers)))

    async def load_adapter(self, adapter: str, folder: Path) -> tuple[str, ...]:
        """Make a LoRA adapter ready, of safetensors in a local folder. The names that are.

        Raises EngineRefused, with the reason, for an adapter that cannot be taken or a name in use; EngineFailed.
        """
        return await self._adapters_after(LoadAdapter(adapter, str(folder)))

    async def unload_adapter(self, adapter: str) -> tuple[str, ...]:
        """Let go of one, once the texts that are written with it are over. The names that are ready.

        From the call on no other text may name it. Raises like `load_adapter`, also where those texts take too long: it
        is then to be unloaded again.
        """
        return await self._adapters_after(UnloadAdapter(adapter))

    async def _adapters_after(self, order: LoadAdapter | UnloadAdapter) -> tuple[str, ...]:
        answer = await self._ask(order, ADAPTER_TIMEOUT_S)
        assert isinstance(answer, Adapters)
        return answer.names

    async def _take(self, answer: FromEngine) -> None:
        if not isinstance(answer, Step):
            await super()._take(answer)
            return
        self._begun.difference_update(grown.sequence for grown in answer.grown if grown.finish)
        self._expect_a_step()
        if self._on_step is not None:
            await self._on_step(answer)

    def _expect_a_step(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._begun:
            cause = f"it said nothing for {self._silence_s:g} s while it had texts to write"
            self._deadline = asyncio.get_running_loop().call_later(self._silence_s, self._kill, cause)

    async def _end(self) -> None:
        self._begun.clear()
        self._expect_a_step()
        await super()._end()
