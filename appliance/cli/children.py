"""One child process of the supervisor: started, restarted when it dies, stopped for good."""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from appliance import processes
from appliance.cli.startup import EXIT_CONFIG
from appliance.errors import StartupError
from appliance.telemetry import MULTIPROCESS_VARIABLE

RESTART_DELAY_S_MIN = 0.2
RESTART_DELAY_S_MAX = 10.0
STEADY_S = 30.0  # a child that lived this long starts the delays anew
KILL_WAIT_S = 5.0
METRICS_BYTES_MIN = 4 * 1024 * 1024  # a process writes its figures through memory maps; it dies where they find no room

_log = logging.getLogger(__name__)


class Part(msgspec.Struct, frozen=True):
    """What to run. `stop_s` is how long it may take to stop before it is killed.

    `prepare` runs before each start and puts what the part needs on disk; it may raise StartupError.
    """

    name: str
    command: tuple[str, ...]
    environ: dict[str, str]
    stop_s: float
    prepare: Callable[[], None] | None = None


class Child:
    """Keeps one part running. In a session of its own: Ctrl-C reaches the supervisor alone, which stops in order."""

    def __init__(self, part: Part, *, metrics_dir: Path, proved: asyncio.Event) -> None:
        """`proved` is set once everything has run as configured: whatever stops a part after that may pass."""
        self._part = part
        self._metrics_dir = metrics_dir
        self._proved = proved
        self._process: asyncio.subprocess.Process | None = None
        self._is_stopping = False
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Start it, and again whenever it dies, until `stop`. Raises StartupError when starting again cannot help."""
        delay_s = RESTART_DELAY_S_MIN
        while not self._is_stopping:
            started_s = asyncio.get_running_loop().time()
            ending = await self._live()
            if self._is_stopping:
                break
            if asyncio.get_running_loop().time() - started_s > STEADY_S:
                delay_s = RESTART_DELAY_S_MIN
            _log.error("the %s ended (%s); it is started again in %.1f s", self._part.name, ending, delay_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._stopped.wait()
            delay_s = min(2 * delay_s, RESTART_DELAY_S_MAX)

    async def stop(self) -> None:
        """Ask it to stop, then insist. Returns when the process is gone."""
        self._is_stopping = True
        self._stopped.set()
        process = self._process
        if process is None or process.returncode is not None:
            return
        for number, wait_s in ((signal.SIGTERM, self._part.stop_s), (signal.SIGKILL, KILL_WAIT_S)):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await process.wait()
                    return
            _log.warning("the %s did not stop within %.0f s", self._part.name, wait_s)

    def kill(self) -> None:
        """At once, without ceremony."""
        self._is_stopping = True
        self._stopped.set()
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def gone(self) -> None:
        """Return when a process that was killed has ended."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(KILL_WAIT_S):
                    await self._process.wait()

    async def _live(self) -> str:
        """One life of the part; says how it ended. Raises StartupError as `run` does."""
        try:
            process = await self._start()
        except StartupError as error:
            if not self._proved.is_set():
                raise
            return str(error)
        if self._is_stopping:  # while there was no process to stop yet; this one has nothing to finish
            self.kill()
        code = await process.wait()
        mark_process_dead(process.pid, str(self._metrics_dir))  # type: ignore[no-untyped-call]  # untyped library
        if code == EXIT_CONFIG and not self._is_stopping and not self._proved.is_set():
            raise StartupError(f"the {self._part.name} cannot run as configured; its message is above")
        return _how(code)

    async def _start(self) -> asyncio.subprocess.Process:
        if self._part.prepare is not None:
            self._part.prepare()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self._part.command,
                stdin=asyncio.subprocess.DEVNULL,
                env=self._environ(),
                start_new_session=True,
                preexec_fn=processes.die_with_parent,  # safe between fork and exec: this process runs one thread
            )
        except OSError as error:
            raise StartupError(f"the {self._part.name} cannot be started: {error.strerror}") from error
        return self._process

    def _environ(self) -> dict[str, str]:
        """With a place for its figures in our metrics, if there is room for them. Raises OSError."""
        self._metrics_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        environ = dict(self._part.environ)
        if MULTIPROCESS_VARIABLE in environ and shutil.disk_usage(self._metrics_dir).free < METRICS_BYTES_MIN:
            _log.error("the disk of %s is full; /metrics goes without the %s", self._metrics_dir, self._part.name)
            del environ[MULTIPROCESS_VARIABLE]
        return environ


def environment(changes: Mapping[str, str]) -> dict[str, str]:
    """This process' environment with changes."""
    return {**os.environ, **changes}


def _how(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    return signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
