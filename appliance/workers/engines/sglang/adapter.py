"""Answers a node's frames by an SGLang server: `Load` starts one, each `Begin` is a request to it."""

import asyncio
import contextlib
import logging
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from appliance.workers import wire
from appliance.workers.engines.sglang import asking
from appliance.workers.engines.sglang.answers import StreamBroken, fault, grown_of, public
from appliance.workers.engines.sglang.client import Client, ServerInfo, ServerRefused, ServerUnreachable
from appliance.workers.engines.sglang.environment import VERSION_MIN, Environment, is_old
from appliance.workers.engines.sglang.launch import check_device
from appliance.workers.engines.sglang.loras import Loras, limits_of
from appliance.workers.engines.sglang.outbox import Outbox
from appliance.workers.engines.sglang.server import Server, ServerDied
from appliance.workers.wire import (
    Abort,
    Adapters,
    Begin,
    Encode,
    Fault,
    Grown,
    Load,
    LoadAdapter,
    Loaded,
    Stop,
    ToEngine,
    UnloadAdapter,
)

EXIT_DONE: Final = 0
EXIT_MALFORMED_FRAME: Final = 2
EXIT_SERVER_DIED: Final = 3

SEQUENCES_MAX: Final = 4096  # begun and not over
ABORTS_MAX: Final = 20  # of one sequence, until SGLang knows it and lets go
_ABORT_WAIT_S: Final = 0.25
_WARM_UP: Final = '{"grammars":[{"json_schema":{"type":"boolean"}}]}'
_GIB: Final = 2**30

E = TypeVar("E", bound=Exception)

_log = logging.getLogger("appliance.engine")


class _Ended(Exception):
    """No more frames are to be answered."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class Adapter:
    """Serves one node over one connection, and holds one model."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        environment: Environment,
        threads: int,
    ) -> None:
        self._reader = reader
        self._outbox = Outbox(writer)
        self._environment = environment
        self._threads = threads
        self._held = AsyncExitStack()
        self._tasks = asyncio.TaskGroup()
        self._is_asked = False
        self._answering = asyncio.Lock()  # answers come in the order of what they answer
        self._client: Client | None = None
        self._loras: Loras | None = None
        self._vocabulary = 0
        self._tokens_max = 0
        self._writing: dict[int, asyncio.Task[None]] = {}
        self._aborted: set[int] = set()

    async def serve(self) -> int:
        """Until `Stop`, the end of the stream or of the server; nothing of the server is left then. The exit code."""
        exit_code = EXIT_DONE
        try:
            async with self._held, self._tasks:
                self._tasks.create_task(self._outbox.run())
                await self._follow_frames()
        except* _Ended as group:
            exit_code = _first(group).exit_code
        except* ServerDied as group:
            _log.error("%s", _first(group))
            exit_code = EXIT_SERVER_DIED
        except* ConnectionError:
            _log.info("the node is gone")
        return exit_code

    @property
    def client(self) -> Client:
        """To the server, once there is one."""
        assert self._client is not None
        return self._client

    async def _follow_frames(self) -> None:
        """Raises `_Ended` when there are no more."""
        while True:
            try:
                order = await _receive(self._reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                raise _Ended(EXIT_DONE) from None
            except (ValueError, msgspec.DecodeError) as exc:
                _log.error("the node sent a malformed frame: %s", exc)
                raise _Ended(EXIT_MALFORMED_FRAME) from exc
            match order:
                case Load():
                    self._load_once(order)
                case Begin():
                    await self._begin(order)
                case Abort():
                    self._abort(order)
                case LoadAdapter() | UnloadAdapter():
                    self._tasks.create_task(self._change_adapters(order))
                case Stop():
                    raise _Ended(EXIT_DONE)
                case Encode():
                    _log.error("the node asked for vectors of an engine that writes texts")
                    raise _Ended(EXIT_MALFORMED_FRAME)

    def _load_once(self, order: Load) -> None:
        if self._is_asked:
            self._outbox.say(Fault(-1, "invalid", "this engine holds one model; start another for another"))
            return
        self._is_asked = True
        self._tasks.create_task(self._hold(order))

    async def _hold(self, order: Load) -> None:
        """Start the server, answer the `Load`, and watch. Raises ServerDied if it ends after that."""
        async with self._answering:
            server = await self._answer(order)
        if server is not None:
            raise await server.died()

    async def _answer(self, order: Load) -> Server | None:
        """The server that runs; None if it could not be started, or does not work."""
        started_s = asyncio.get_running_loop().time()
        try:
            server, client = await self._start(order)
            info = await client.info()
            check_info(info)
            await _warm_up(client)
        except ValueError as exc:
            self._outbox.say(Fault(-1, "invalid", str(exc)))
        except ServerDied as exc:
            self._outbox.say(Fault(-1, exc.code, str(exc)))
        except (ServerRefused, ServerUnreachable, StreamBroken) as exc:
            _log.exception("SGLang does not work as it should")
            self._outbox.say(Fault(-1, "failed", public(str(exc))))
        else:
            self._tokens_max = info.max_req_input_len  # a few below its context: within it nothing is ever cut
            self._client = client
            self._loras = Loras(client, base=Path(order.folder), limits=limits_of(info))
            load_s = asyncio.get_running_loop().time() - started_s
            self._outbox.say(loaded_of(order, info, tokens_max=self._tokens_max, load_s=load_s))
            return server
        return None

    async def _change_adapters(self, order: LoadAdapter | UnloadAdapter) -> None:
        """One after the other, as the node asked."""
        async with self._answering:
            try:
                self._outbox.say(Adapters(await self._adapters_after(order)))
            except ValueError as exc:
                self._outbox.say(Fault(-1, "invalid", public(str(exc))))
            except ServerRefused as exc:
                code = "invalid" if 400 <= exc.status < 500 else "failed"
                self._outbox.say(Fault(-1, code, public(str(exc)) or "SGLang refused the adapter"))
            except (ServerUnreachable, StreamBroken):
                _log.exception("an adapter is neither loaded nor unloaded")
                self._outbox.say(Fault(-1, "failed", "SGLang does not say what became of the adapter; unload it"))

    async def _adapters_after(self, order: LoadAdapter | UnloadAdapter) -> tuple[str, ...]:
        """The names that are ready. Raises ValueError for what is not asked of SGLang, and what its client raises."""
        if self._loras is None:
            raise ValueError("the model is not loaded")
        if isinstance(order, LoadAdapter):
            await self._loras.load(order.adapter, Path(order.folder))
        else:
            await self._loras.unload(order.adapter)
        return tuple(sorted(self._loras.names))

    async def _start(self, order: Load) -> tuple[Server, Client]:
        """Both are left with the adapter. Raises ValueError, ServerDied."""
        installed = self._environment.installed()
        if installed is None:
            raise ValueError("SGLang is not installed; run `appliance engines install sglang`")
        if is_old(installed.version):
            raise ValueError(old_words(installed.version))
        check_device(order.device, installed.kind)
        sizes = sizes_of(Path(order.folder))
        self._vocabulary = sizes.vocabulary
        server = Server(
            self._environment,
            order,
            kind=installed.kind,
            threads=order.threads or self._threads,
            model_tokens_max=sizes.tokens_max,
        )
        await self._held.enter_async_context(server)
        client = await self._held.enter_async_context(server.client())
        await server.ready(client)
        return server, client

    async def _begin(self, begin: Begin) -> None:
        self._outbox.begun(begin.sequence)
        if self._client is None:
            await self._outbox.put(Grown(begin.sequence, finish="fault", fault="the model is not loaded"))
        elif len(self._writing) >= SEQUENCES_MAX:
            await self._outbox.put(Grown(begin.sequence, finish="fault", fault="the engine is full"))
        else:
            task = self._tasks.create_task(self._write(begin))
            self._writing[begin.sequence] = task
            if self._loras is not None:
                self._loras.follow(begin.adapter, task)
            task.add_done_callback(lambda _: self._forget(begin.sequence))

    def _forget(self, sequence: int) -> None:
        del self._writing[sequence]
        self._aborted.discard(sequence)

    def _abort(self, order: Abort) -> None:
        for sequence in order.sequences:
            task = self._writing.get(sequence)
            if task is not None and sequence not in self._aborted:
                self._aborted.add(sequence)
                self._tasks.create_task(self._end(sequence, task))
        self._outbox.forget(order.sequences)

    async def _end(self, sequence: int, task: asyncio.Task[None]) -> None:
        """Have SGLang let go of a sequence: an abort that overtakes its request is not heard, so it is said again."""
        for _ in range(ABORTS_MAX):
            with contextlib.suppress(ServerRefused, ServerUnreachable, StreamBroken):
                await self.client.abort(asking.rid_of(sequence))
            await asyncio.wait({task}, timeout=_ABORT_WAIT_S)
            if task.done():
                return
        _log.warning("SGLang does not let go of a request; its connection is dropped")
        task.cancel()

    async def _write(self, begin: Begin) -> None:
        """One sequence from its beginning to its end."""
        adapters = self._loras.names if self._loras is not None else frozenset()
        try:
            asking.check(begin, vocabulary=self._vocabulary, tokens_max=self._tokens_max, adapters=adapters)
        except ValueError as exc:
            await self._say(Grown(begin.sequence, finish="fault", fault=str(exc)))
            return
        try:
            is_over = await self._follow(begin)
        except ServerRefused as exc:
            await self._say(fault(begin.sequence, str(exc), status=exc.status))
        except (ServerUnreachable, StreamBroken):
            _log.exception("a text is lost")
            await self._say(fault(begin.sequence, "", status=None))
            with contextlib.suppress(ServerRefused, ServerUnreachable, StreamBroken):
                await self.client.abort(asking.rid_of(begin.sequence))
        else:
            if not is_over:
                await self._say(fault(begin.sequence, "", status=None))

    async def _follow(self, begin: Begin) -> bool:
        """Pass on what SGLang sends, to the end of its stream; whether the sequence was said to be over."""
        is_first, is_over = True, False
        async with aclosing(self.client.generate(asking.request_of(begin))) as events:
            async for event in events:
                if is_over or begin.sequence in self._aborted:
                    continue  # the stream ends by itself, and its connection can be used again
                grown = grown_of(event, begin, is_first=is_first)
                is_first, is_over = False, bool(grown.finish)
                await self._say(grown)
        return is_over

    async def _say(self, grown: Grown) -> None:
        if grown.sequence not in self._aborted:
            await self._outbox.put(grown)


def check_info(info: ServerInfo) -> None:
    """Raises ValueError for a server that is too old, or would run a stranger's code."""
    if is_old(info.version):
        raise ValueError(old_words(info.version))
    if info.trust_remote_code or info.enable_custom_logit_processor:
        raise ValueError("SGLang runs with remote code or custom logit processors, which must be off")


def old_words(version: str) -> str:
    """What to do about an old SGLang."""
    floor = ".".join(map(str, VERSION_MIN))
    return f"SGLang {version} is installed, {floor} or newer is needed: run `appliance engines install sglang`"


def loaded_of(order: Load, info: ServerInfo, *, tokens_max: int, load_s: float) -> Loaded:
    """The answer to a `Load`."""
    state = info.internal_states[0] if info.internal_states else None
    running = (state.effective_max_running_requests_per_dp if state else None) or 1
    weight_gib = state.memory_usage.get("weight") if state else None
    return Loaded(
        model=order.model,
        width=0,
        tokens_max=tokens_max,
        dtype=order.dtype,
        weights_bytes=int(weight_gib * _GIB) if isinstance(weight_gib, int | float) else 0,
        load_s=load_s,
        sequences_max=running * info.dp_size,
    )


@dataclass(frozen=True)
class Sizes:
    """Of a model, by its own files."""

    vocabulary: int  # token ids
    tokens_max: int | None  # None: they do not say


def sizes_of(folder: Path) -> Sizes:
    """Raises ValueError for a folder that does not say how many token ids its model knows."""
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config)
    except (OSError, msgspec.DecodeError) as exc:
        raise ValueError("config.json of the model cannot be read") from exc
    text = config.text_config or config  # of a model that reads more than text
    vocabulary = text.vocab_size or config.vocab_size
    if vocabulary is None:
        raise ValueError("config.json of the model names no vocab_size")
    return Sizes(vocabulary, text.max_position_embeddings or config.max_position_embeddings)


class _Config(msgspec.Struct, frozen=True):
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    text_config: "_Config | None" = None


async def _warm_up(client: Client) -> None:
    """One constrained token: shows that grammars work, and takes their compilation off the first client."""
    request = asking.GenerateRequest(
        "warm-up", (0,), asking.SamplingParams(max_new_tokens=1, temperature=0.0, ebnf=_WARM_UP), stream=True
    )
    async with aclosing(client.generate(request)) as events:
        async for event in events:
            reason = event.meta_info.finish_reason
            if event.error is not None or (reason is not None and reason.type == "abort"):
                words = event.error.message if event.error else reason.message if reason else ""
                raise StreamBroken(f"a constrained text failed: {words}")


async def _receive(reader: asyncio.StreamReader) -> ToEngine:
    header = await reader.readexactly(wire.LENGTH_BYTES)
    return wire.decode_to_engine(await reader.readexactly(wire.body_length(header)))


def _first(group: ExceptionGroup[E]) -> E:
    """One of the exceptions in it."""
    found = group.exceptions[0]
    return _first(found) if isinstance(found, ExceptionGroup) else found
