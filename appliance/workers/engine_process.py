"""The node's client of one engine process: start it, ask it, and never leave it behind.

    EngineFailed (errors.py)     the engine reported an unexpected fault; it lives on
    ├── EngineOutOfMemory        this batch does not fit; a smaller one may
    ├── EngineRefused            this batch, or this model, is not well-formed; the same again fails again
    └── EngineDied               the process is gone, and with it everything outstanding

All share the code `engine_failed`: if one reaches a client, that is what the client may know. Nothing is restarted
here; the node decides, and enters a new `EngineProcess`.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import struct
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from appliance.errors import EngineFailed, StartupError
from appliance.workers import wire
from appliance.workers.wire import (
    Adapters,
    Encode,
    Encoded,
    Fault,
    FromEngine,
    Load,
    LoadAdapter,
    Loaded,
    Stop,
    ToEngine,
    UnloadAdapter,
)

OUTSTANDING_MAX: Final = 256  # a bug's bound: nodes hand over a few batches ahead
SOCKET_NAME_BYTES_MAX: Final = 24  # of ours, with the slash before it
SOCKET_PATH_BYTES_MAX: Final = 107  # sun_path is 108 with its NUL on Linux, 104 elsewhere
_STDERR_LINES_MAX: Final = 20
_STDERR_LINE_BYTES_MAX: Final = 2000
# As engine processes of ours log: the node's own line says which engine speaks, and when.
_ENGINE_LINE: Final = re.compile(r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) [\w.]+ (?P<message>.*)")
_EXIT_WAIT_S: Final = 2.0  # from the end of the stream to the end of the process
_PEER_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid, gid

Asked = Load | Encode | LoadAdapter | UnloadAdapter  # frames that an engine answers, in order
Answered = Loaded | Encoded | Adapters

_log = logging.getLogger(__name__)


class EngineOutOfMemory(EngineFailed):
    """The device has too little memory for this batch or model; a smaller one may fit."""


class EngineRefused(EngineFailed):
    """The engine refused this batch or this model; the same again would be refused again."""


class EngineDied(EngineFailed):
    """The engine process is gone; whatever was outstanding is lost and may be computed elsewhere.

    `was_begun` says that the engine had this batch in hand when it died; one that waited behind it is not at fault.
    """

    def __init__(self, message: str, *, stderr_tail: Sequence[str] = (), was_begun: bool = False) -> None:
        super().__init__(message)
        self.stderr_tail = tuple(stderr_tail)
        self.was_begun = was_begun


def host_command(engine: str, *, threads: int) -> list[str]:
    """The command that runs one of our own engines ("encoder", "fake") under this interpreter."""
    return [sys.executable, "-m", "appliance.workers.host", "--engine", engine, "--threads", str(threads)]


class EngineProcess:
    """One engine process, from `async with` to its exit. Use from one event loop, in the main thread.

    Several `encode` calls may be outstanding; the engine answers in order. A cancelled call leaves its batch with the
    engine and drops the answer. Linux kills the process when the thread that started it ends.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        sockets_dir: Path,
        start_timeout_s: float,
        batch_timeout_s: float,
        stop_timeout_s: float = 5.0,
    ) -> None:
        """`command` gets `--socket PATH` appended and must dial it; `name` is for logs only."""
        self.name = name
        self._command = tuple(command)
        self._sockets_dir = sockets_dir
        self._start_timeout_s = start_timeout_s
        self._batch_timeout_s = batch_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._waiting: deque[_Waiting] = deque()
        self._stderr: deque[str] = deque(maxlen=_STDERR_LINES_MAX)
        self._level = logging.INFO  # of its last line; what follows without one, as a traceback does, belongs to it
        self._dead: asyncio.Future[EngineDied] | None = None
        self._cause = ""  # why we killed it, when we did
        self._batches = 0
        self._silence: asyncio.TimerHandle | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Start the process and wait until it has dialled. Raises `EngineDied`, or `StartupError` for the socket."""
        self._dead = asyncio.get_running_loop().create_future()
        try:
            with _listener(self._sockets_dir) as listener:
                await self._start(listener)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ask it to stop after what it has in hand, then insist: `Stop`, SIGTERM, SIGKILL, each with its wait."""
        try:
            await self._stop()
        finally:
            await self._end()

    @property
    def pid(self) -> int:
        """The process id, for logs and metrics."""
        assert self._process is not None
        return self._process.pid

    @property
    def is_started(self) -> bool:
        """True once there is a process, which may not have dialled yet, or be gone again."""
        return self._process is not None

    @property
    def stderr_tail(self) -> tuple[str, ...]:
        """The last lines that the process printed."""
        return tuple(self._stderr)

    @property
    def outstanding(self) -> int:
        """Frames that the engine has not answered yet."""
        return len(self._waiting)

    async def died(self) -> EngineDied:
        """Wait until the process is gone, and return (not raise) how it went."""
        assert self._dead is not None
        return await asyncio.shield(self._dead)

    async def load(self, order: Load) -> Loaded:
        """Make a model resident, within the start timeout. Raises `EngineFailed` or one of its kinds above."""
        answer = await self._ask(order, self._start_timeout_s)
        assert isinstance(answer, Loaded)
        return answer

    async def encode(
        self,
        model: str,
        ids: bytes,
        lengths: Sequence[int],
        second_starts: Sequence[int] = (),
        *,
        per_token: Sequence[int] = (),
        texts: Sequence[str] = (),
    ) -> Encoded:
        """Compute one batch, packed as `wire.Encode` says. Raises `EngineFailed` or one of its kinds above.

        The batch timeout runs from when the engine can turn to this batch, not from the call.
        """
        self._batches += 1
        order = Encode(self._batches, model, ids, tuple(lengths), tuple(second_starts), tuple(per_token), tuple(texts))
        answer = await self._ask(order, self._batch_timeout_s)
        assert isinstance(answer, Encoded)
        return answer

    async def _ask(self, order: Asked, timeout_s: float) -> Answered:
        assert self._writer is not None
        assert self._dead is not None
        assert len(self._waiting) < OUTSTANDING_MAX, (
            f"{OUTSTANDING_MAX} frames are outstanding: the caller has no bound"
        )
        if self._dead.done():
            raise _again(self._dead.result())
        try:
            frame = wire.frame(order)
        except ValueError as exc:
            raise EngineRefused(str(exc)) from exc
        waiting = _Waiting(order, timeout_s)
        self._waiting.append(waiting)
        self._send(frame)
        if len(self._waiting) == 1:
            self._watch_next()
        try:
            with contextlib.suppress(ConnectionError):  # the reader sees the end of the stream and says what happened
                await self._writer.drain()
            return await waiting.answer
        finally:
            waiting.answer.cancel()  # of a caller that was cancelled; otherwise it is done

    def _send(self, frame: bytes) -> None:
        """Buffer it. Where the connection has ended, the reader sees its end too and says what happened."""
        assert self._writer is not None
        with contextlib.suppress(ConnectionError, RuntimeError):  # asyncio's word, and uvloop's
            self._writer.write(frame)

    async def _start(self, listener: socket.socket) -> None:
        path = listener.getsockname()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--socket",
                path,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=_environment(),
            )
        except OSError as exc:
            raise StartupError(f"the engine {self.name} cannot be started: {exc.strerror}") from exc
        self._tasks.append(asyncio.create_task(self._follow_output(self._process), name=f"{self.name} output"))
        connection = await self._dialled(listener, self._process)
        reader, self._writer = await asyncio.open_unix_connection(sock=connection)
        self._tasks.append(asyncio.create_task(self._follow_answers(reader), name=f"{self.name} answers"))

    async def _dialled(self, listener: socket.socket, process: asyncio.subprocess.Process) -> socket.socket:
        """The connection from our own child, and no other process."""
        dial = asyncio.create_task(_accept_from(listener, process.pid))
        end = asyncio.create_task(process.wait())
        connection = None
        try:
            await asyncio.wait({dial, end}, timeout=self._start_timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if dial.done():
                connection = dial.result()
                return connection
            if not end.done():
                self._kill(f"it did not dial within {self._start_timeout_s:g} s")
            raise await self._obituary()
        finally:
            dial.cancel()
            end.cancel()
            for outcome in await asyncio.gather(dial, end, return_exceptions=True):
                if isinstance(outcome, socket.socket) and outcome is not connection:
                    outcome.close()  # it dialled while we were being cancelled

    async def _follow_answers(self, reader: asyncio.StreamReader) -> None:
        """Read answers until the stream ends, then fail whatever still waits."""
        try:
            while True:
                await self._take(await _receive(reader))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except (ValueError, msgspec.DecodeError) as exc:
            self._kill(f"it broke the protocol: {exc}")
        except Exception:  # a bug of ours: nobody would read on, and the engine be started again
            _log.exception("what the engine %s said could not be followed", self.name)
            self._kill("the node could not follow it")
        death = await self._obituary()
        assert self._dead is not None
        self._dead.set_result(death)
        self._fail_waiting(death)

    async def _take(self, answer: FromEngine) -> None:
        """One frame. Nothing more is read before this returns. Raises ValueError for one that fits nothing."""
        self._settle(answer)

    def _settle(self, answer: FromEngine) -> None:
        """Hand an answer to the oldest outstanding frame. Raises ValueError if it does not fit that."""
        if not self._waiting or not _answers(answer, self._waiting[0].order):
            raise ValueError(f"{type(answer).__name__} answers nothing that was asked next")
        waiting = self._waiting.popleft()
        self._watch_next()
        if waiting.answer.done():  # the caller was cancelled
            return
        if isinstance(answer, Fault):
            waiting.answer.set_exception(_error(answer))
        elif isinstance(answer, Loaded | Encoded | Adapters):
            waiting.answer.set_result(answer)

    def _watch_next(self) -> None:
        """Give the oldest outstanding frame its time, from now."""
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None
        if self._waiting:
            timeout_s = self._waiting[0].timeout_s
            self._silence = asyncio.get_running_loop().call_later(
                timeout_s, self._kill, f"it did not answer within {timeout_s:g} s"
            )

    def _fail_waiting(self, death: EngineDied) -> None:
        if self._silence is not None:
            self._silence.cancel()
        is_oldest = True  # the engine answers in order, so this is the one it had in hand
        while self._waiting:
            waiting = self._waiting.popleft()
            if not waiting.answer.done():
                waiting.answer.set_exception(_again(death, was_begun=is_oldest))
            is_oldest = False

    def _kill(self, cause: str) -> None:
        self._cause = self._cause or cause
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _obituary(self) -> EngineDied:
        """Wait for the process to be gone, by force if it hung up but runs on, and say how it went."""
        assert self._process is not None
        if not await self._exits_within(_EXIT_WAIT_S):
            self._kill("it closed its connection and ran on")
            await self._exits_within(_EXIT_WAIT_S)
        output = self._tasks[0]
        await asyncio.wait({output}, timeout=_EXIT_WAIT_S)  # its last words
        message = f"the engine {self.name} died: {self._cause or _exit_text(self._process.returncode)}"
        if not self._process.returncode and not self._cause:  # as it was asked to; of deaths `revival` speaks
            _log.info("the engine %s has ended", self.name)
        return EngineDied(message, stderr_tail=self._stderr)

    async def _follow_output(self, process: asyncio.subprocess.Process) -> None:
        """Log what the process prints, and keep the last lines for its obituary."""
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(4096):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._note(line)
            if len(rest) > _STDERR_LINE_BYTES_MAX:
                self._note(rest)
                rest = b""
        if rest:
            self._note(rest)

    def _note(self, line: bytes) -> None:
        text = line[:_STDERR_LINE_BYTES_MAX].decode(errors="replace").rstrip()
        self._stderr.append(text)
        if own := _ENGINE_LINE.fullmatch(text):
            self._level, text = logging.getLevelNamesMapping()[own["level"]], own["message"]
        _log.log(self._level, "engine %s: %s", self.name, text)

    async def _stop(self) -> None:
        """Until the process is gone: ask, then terminate. `_end` kills what is left."""
        assert self._process is not None
        self._send(wire.frame(Stop()))
        if await self._exits_within(self._stop_timeout_s):
            return
        _log.warning("engine %s does not stop; it is terminated", self.name)
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._exits_within(self._stop_timeout_s)

    async def _exits_within(self, timeout_s: float) -> bool:
        assert self._process is not None
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return False
        return True

    async def _end(self) -> None:
        """Leave nothing behind: no process, no task, no socket. Safe to be cancelled: the kill comes first."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._exits_within(_EXIT_WAIT_S)
        if self._tasks:
            # Both end by themselves once the process is gone, unless a grandchild holds its pipe open.
            _, late = await asyncio.wait(self._tasks, timeout=2 * _EXIT_WAIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            with contextlib.suppress(ConnectionError):
                await self._writer.wait_closed()
        if self._dead is not None and not self._dead.done():
            self._dead.set_result(EngineDied(f"the engine {self.name} was stopped"))
            self._fail_waiting(self._dead.result())


class _Waiting:
    """One frame that the engine has to answer."""

    def __init__(self, order: Asked, timeout_s: float) -> None:
        self.order = order
        self.timeout_s = timeout_s
        self.answer: asyncio.Future[Answered] = asyncio.get_running_loop().create_future()


def _answers(answer: FromEngine, order: ToEngine) -> bool:
    match order:
        case Load():
            return isinstance(answer, Loaded) or (isinstance(answer, Fault) and answer.batch == -1)
        case Encode(batch=batch):
            return isinstance(answer, Encoded | Fault) and answer.batch == batch
        case LoadAdapter() | UnloadAdapter():
            return isinstance(answer, Adapters) or (isinstance(answer, Fault) and answer.batch == -1)
        case _:
            return False


def _error(fault: Fault) -> EngineFailed:
    kinds = {"oom": EngineOutOfMemory, "invalid": EngineRefused}
    return kinds.get(fault.code, EngineFailed)(fault.message)


def _again(death: EngineDied, *, was_begun: bool = False) -> EngineDied:
    """The same death for another waiter: one exception object raised in many tasks would mix their tracebacks."""
    return EngineDied(death.message, stderr_tail=death.stderr_tail, was_begun=was_begun)


def _exit_text(returncode: int | None) -> str:
    if returncode is not None and returncode < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-returncode).name}"
    return f"it exited with status {returncode}"


async def _receive(reader: asyncio.StreamReader) -> FromEngine:
    header = await reader.readexactly(wire.LENGTH_BYTES)
    return wire.decode_from_engine(await reader.readexactly(wire.body_length(header)))


async def _accept_from(listener: socket.socket, pid: int) -> socket.socket:
    """The first connection made by process `pid`; others are hung up on."""
    while True:
        connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        if _peer_pid(connection) in {pid, None}:
            return connection
        _log.warning("a stranger dialled an engine socket; it was refused")
        connection.close()


def _peer_pid(connection: socket.socket) -> int | None:
    """The process at the other end as the kernel knows it; None where the platform does not say."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return None
    credentials = connection.getsockopt(socket.SOL_SOCKET, option, _PEER_CREDENTIALS.size)
    return int(_PEER_CREDENTIALS.unpack(credentials)[0])


@contextlib.contextmanager
def _listener(directory: Path) -> Iterator[socket.socket]:
    """A listening socket with a name of its own in `directory`; the name is gone when the block ends."""
    path = directory.absolute() / f"engine-{secrets.token_hex(4)}.sock"
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise StartupError(
            f"the socket path {path} has {length} B, the system takes {SOCKET_PATH_BYTES_MAX}; "
            "set `state_dir` to a shorter path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            listener.bind(str(path))
            path.chmod(0o600)  # before it listens: until then nobody can connect
            listener.listen(1)
            listener.setblocking(False)
        except OSError as exc:
            raise StartupError(f"the socket {path} cannot be made: {exc.strerror}") from exc
        try:
            yield listener
        finally:
            path.unlink(missing_ok=True)


def _environment() -> dict[str, str]:
    """What the process inherits: all but our own settings, among which are the API keys and the queue's password."""
    return {name: value for name, value in os.environ.items() if not name.startswith("APPLIANCE_")}
