"""One SGLang server: its processes, from the start to the last one's end.

It has three processes or more, all in a session of their own. The first is killed by the kernel when ours ends, however
that happens, and SGLang has the others follow it; at an orderly end the whole group is told, then killed.
"""

import asyncio
import contextlib
import logging
import os
import re
import secrets
import signal
import socket
import tempfile
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

from appliance.processes import die_with_parent
from appliance.workers.engines.sglang.answers import public
from appliance.workers.engines.sglang.client import Client
from appliance.workers.engines.sglang.environment import Environment, Kind
from appliance.workers.engines.sglang.launch import HOST, command_of, config_of, environment_of
from appliance.workers.wire import Load

KEY_BYTES: Final = 32
STOP_S: Final = 3.0  # after it the group is killed: the node waits five seconds for us
LINES_MAX: Final = 60
LINE_BYTES_MAX: Final = 2000
EXIT_BAD_FLAGS: Final = 2  # argparse's
CONFIG_NAME: Final = "config.yaml"
_POLL_S: Final = 0.2
_END_S: Final = 2.0

_log = logging.getLogger("appliance.engine")


class ServerDied(Exception):
    """The server has ended by itself. `code` is a `Fault`'s; the message is fit for a client, the log has the rest."""

    def __init__(self, message: str, *, code: Literal["oom", "invalid", "failed"] = "failed") -> None:
        super().__init__(message)
        self.code = code


class Server:
    """An async context manager: entered when the process has been started, left when all of it is gone."""

    def __init__(
        self, environment: Environment, order: Load, *, kind: Kind, threads: int, model_tokens_max: int | None = None
    ) -> None:
        """Raises ValueError for a flag that a preset may not set."""
        self._key = secrets.token_urlsafe(KEY_BYTES)
        self._port = free_port()
        self._config = config_of(order, port=self._port, key=self._key, model_tokens_max=model_tokens_max)
        self._environment = environment
        self._variables = environment_of(kind, os.environ, threads=threads)
        self._lines: deque[str] = deque(maxlen=LINES_MAX)
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._is_told_to_end = False
        self._output: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        """Start it. Raises ServerDied where it cannot be started."""
        self._folder, config = _config_file(self._config)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command_of(self._environment, config),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=self._variables,
                cwd=self._folder.name,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        except OSError as exc:
            self._folder.cleanup()
            raise ServerDied(f"SGLang cannot be started: {exc.strerror}", code="invalid") from exc
        self._output = asyncio.create_task(self._follow_output(self._process), name="output of SGLang")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Tell the whole group to end, then kill what is left of it."""
        assert self._process is not None
        assert self._folder is not None
        assert self._output is not None
        self._is_told_to_end = True
        try:
            if self._process.returncode is None:
                self._signal(signal.SIGTERM)
                await self._exits_within(STOP_S)
        finally:
            self._signal(signal.SIGKILL)
            await self._exits_within(_END_S)
            _, late = await asyncio.wait({self._output}, timeout=_END_S)
            for task in late:
                task.cancel()
            await asyncio.gather(self._output, return_exceptions=True)
            self._folder.cleanup()

    @property
    def pid(self) -> int:
        """Of the first of its processes, and of their group."""
        assert self._process is not None
        return self._process.pid

    def client(self) -> Client:
        """To ask it; the caller enters it."""
        return Client(f"http://{HOST}:{self._port}", key=self._key)

    async def ready(self, client: Client) -> None:
        """Wait until it answers. Raises ServerDied; the node bounds the wait."""
        end = asyncio.create_task(self.died())
        try:
            while not await client.is_healthy():
                await asyncio.wait({end}, timeout=_POLL_S)
                if end.done():
                    raise end.result()
        finally:
            end.cancel()
            await asyncio.gather(end, return_exceptions=True)
        assert self._folder is not None
        os.unlink(os.path.join(self._folder.name, CONFIG_NAME))  # it has been read

    async def died(self) -> ServerDied:
        """Wait until it has ended, and return (not raise) why."""
        assert self._process is not None
        assert self._output is not None
        returncode = await self._process.wait()
        await asyncio.wait({self._output}, timeout=_END_S)  # its last words
        return reason(returncode, list(self._lines))

    def _signal(self, number: signal.Signals) -> None:
        """To every process of the group that there is."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    async def _exits_within(self, timeout_s: float) -> None:
        assert self._process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._process.wait()

    async def _follow_output(self, process: asyncio.subprocess.Process) -> None:
        """Pass on what it prints, and keep the end of it."""
        assert process.stdout is not None
        rest = b""
        while chunk := await process.stdout.read(4096):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                self._note(line)
            rest = rest[-LINE_BYTES_MAX:]
        self._note(rest)

    def _note(self, line: bytes) -> None:
        text = (
            line[-LINE_BYTES_MAX:].decode(errors="replace").rstrip().rpartition("\r")[2]
        )  # of a progress bar: its end
        if text:
            self._lines.append(text)
            # What its libraries say of themselves while it is taken apart is nobody's concern.
            _log.log(logging.DEBUG if self._is_told_to_end else logging.INFO, "sglang: %s", text)


def reason(returncode: int, lines: Sequence[str]) -> ServerDied:
    """Why a server ended, from its status and its last lines. Pure."""
    text = "\n".join(lines)
    if re.search(r"out of memory|OutOfMemoryError|Not enough memory", text, re.IGNORECASE):
        return ServerDied("SGLang has too little memory for this model with these flags", code="oom")
    if returncode == EXIT_BAD_FLAGS and (found := re.search(r"error: (.+)", text)):
        return ServerDied(public(f"SGLang refuses its flags: {found.group(1)}"), code="invalid")
    how = f"killed by signal {-returncode}" if returncode < 0 else f"status {returncode}"
    said = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return ServerDied(public(f"SGLang ended ({how})" + (f": {said[-1]}" if said else "")))


def _config_file(content: str) -> tuple[tempfile.TemporaryDirectory[str], Path]:
    """In a folder that no other user can enter: it has the key in it."""
    folder = tempfile.TemporaryDirectory(prefix="appliance-sglang-")
    path = Path(folder.name, CONFIG_NAME)
    path.write_text(content, encoding="utf-8")
    return folder, path


def free_port() -> int:
    """A loopback port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
