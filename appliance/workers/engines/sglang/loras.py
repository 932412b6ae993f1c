"""The LoRA adapters of one SGLang server: which a text may name, and what is never asked of SGLang.

By itself SGLang makes room for one too many by unloading the one that was named longest ago, and loads one that was
unloaded again when a request names it.
"""

import asyncio
from pathlib import Path
from typing import Final, NamedTuple

from appliance.workers.engines.sglang.client import Client, ServerInfo, ServerRefused
from appliance.workers.engines.sglang.lora_files import check_lora

NAME_CHARS_MAX: Final = 256
UNLOAD_WAIT_S: Final = 120.0  # for the texts that are written with it
_UNKNOWN: Final = "does not exist"  # SGLang's, of a name


class Limits(NamedTuple):
    """What a preset's flags leave."""

    count_max: int  # 0: no adapters at all
    rank_max: int


def limits_of(info: ServerInfo) -> Limits:
    """By what the server says of itself. SGLang changes adapters in one replica only."""
    if not info.enable_lora or info.dp_size > 1:
        return Limits(0, 0)
    return Limits(info.max_loaded_loras or info.max_loras_per_batch, info.max_lora_rank or 0)


class Loras:
    """Its caller changes one at a time."""

    def __init__(self, client: Client, *, base: Path, limits: Limits, unload_wait_s: float = UNLOAD_WAIT_S) -> None:
        """`base` is the model's folder."""
        self._client = client
        self._base = base
        self._limits = limits
        self._unload_wait_s = unload_wait_s
        self._ready: set[str] = set()
        self._held: set[str] = set()  # with those that SGLang has, or may have, and that nothing may name
        self._texts: dict[str, set[asyncio.Task[None]]] = {}

    @property
    def names(self) -> frozenset[str]:
        """Those that a text may name."""
        return frozenset(self._ready)

    def follow(self, name: str, text: asyncio.Task[None]) -> None:
        """This text is written with it, so unloading waits for its end. Nothing for a name that is not ready."""
        if name in self._ready:
            texts = self._texts.setdefault(name, set())
            texts.add(text)
            text.add_done_callback(texts.discard)

    async def load(self, name: str, folder: Path) -> None:
        """Make it ready. Raises ValueError for what is not asked of SGLang, and what the client raises."""
        self._check_name(name)
        await asyncio.to_thread(check_lora, folder, base=self._base, rank_max=self._limits.rank_max)
        self._held.add(name)
        try:
            await self._client.load_lora(name, str(folder))
        except ServerRefused as exc:
            if exc.status < 500:  # otherwise nobody knows how far it came
                self._held.discard(name)
            raise
        self._ready.add(name)

    async def unload(self, name: str) -> None:
        """Let go of it after the texts that are written with it; from the call on no other may name it.

        Raises like `load`, and ValueError where they take too long: it may then be unloaded again.
        """
        if name not in self._held:
            raise ValueError("the adapter is not loaded")
        self._ready.discard(name)
        texts = self._texts.get(name)
        if texts:
            _, late = await asyncio.wait(set(texts), timeout=self._unload_wait_s)
            if late:
                raise ValueError(
                    f"{len(late)} texts are still written with the adapter after {self._unload_wait_s:g} s; no other "
                    "may name it: unload it again when they have ended"
                )
        try:
            await self._client.unload_lora(name)
        except ServerRefused as exc:
            if _UNKNOWN not in str(exc):
                raise
        self._held.discard(name)
        self._texts.pop(name, None)

    def _check_name(self, name: str) -> None:
        """Raises ValueError for one that is none, or is taken, or one too many."""
        if not self._limits.count_max:
            raise ValueError("the model takes no adapters: its preset needs the flag enable-lora, and no dp-size")
        if not name or len(name) > NAME_CHARS_MAX or not name.isprintable():
            raise ValueError(f"an adapter's name has 1 to {NAME_CHARS_MAX} printable characters")
        if name in self._ready:
            raise ValueError("an adapter of this name is loaded; unload it first")
        if name in self._held:
            raise ValueError("an adapter of this name is not unloaded yet; unload it again first")
        if len(self._held) >= self._limits.count_max:
            raise ValueError(
                f"{len(self._held)} adapters are loaded, the preset's flags max-loaded-loras or max-loras-per-batch "
                f"take {self._limits.count_max}; unload one first"
            )
