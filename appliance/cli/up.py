"""`appliance up`: the whole appliance on one machine. NATS, worker and gateways are its children; it supervises them.

Start: NATS, then worker and gateways together; ready when a gateway says that every model answered through queue and
engine. Stop (SIGTERM, Ctrl-C): gateways first, so that requests in flight are answered, then the worker, then NATS. The
kernel kills the children of a supervisor that is killed itself, and the engines of a worker likewise.
"""

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from appliance.cli import greeting
from appliance.cli.children import Child, Part, environment
from appliance.cli.plan import check_start
from appliance.cli.startup import catalog_of, config_option, prepare, startup_errors, stop_signals, tell
from appliance.errors import StartupError
from appliance.gateway.address import SUPERVISOR, address_of
from appliance.queue.server import HOST, free_port, plan_server
from appliance.settings import NatsSettings, Settings
from appliance.settings_source import variable_of
from appliance.telemetry import MULTIPROCESS_VARIABLE

NATS_START_S = 15.0
NATS_STOP_S = 10.0
STOP_MARGIN_S = 5.0  # to a part's own drain time
READY_POLL_S = 0.1
POLL_TIMEOUT_S = 2.0
SLOW_START_S = 30.0  # then say what is being waited for

_log = logging.getLogger(__name__)


@click.command("up")
@config_option
def up_command(config_file: Path | None) -> None:
    """Run everything on this machine and supervise it."""
    with startup_errors():
        settings = prepare(config_file, part="appliance")
        check_start(settings, role="up", environ=os.environ)  # what it warns of, the worker logs
        with _own(Path(settings.state_dir)) as run_dir:
            # The standard loop: uvloop has no hook between fork and exec, which ties a child's life to ours.
            asyncio.run(Appliance(settings, config_file=config_file, run_dir=run_dir).run())


class Appliance:
    """The parts, and their order."""

    def __init__(self, settings: Settings, *, config_file: Path | None, run_dir: Path) -> None:
        self._settings = settings
        self._catalog = catalog_of(settings)
        self._config = ("--config", str(config_file.absolute())) if config_file else ()
        self._run_dir = run_dir
        self._metrics_dir = _emptied(run_dir / "metrics")
        self._children: list[Child] = []  # in the order of their start; stopped in the reverse order
        self._proved = asyncio.Event()

    async def run(self) -> None:
        """Until a signal, or a StartupError of a part."""
        check_port(self._settings.gateway.host, self._settings.gateway.port)
        stop = stop_signals()
        try:
            async with asyncio.TaskGroup() as group:
                starting = group.create_task(self._start(group))
                await stop.wait()
                starting.cancel()
                tell("stopping: requests in flight are finished; interrupt again to stop at once")
                await self._stop()
        finally:
            for child in self._children:
                child.kill()
            for child in self._children:
                await child.gone()
        tell("stopped")

    async def _start(self, group: asyncio.TaskGroup) -> None:
        gateway_nats, worker_nats = await self._start_nats(group)
        self._launch(group, self._part("worker", worker_nats, stop_s=self._settings.worker.drain_s))
        for _ in range(self._settings.gateway.processes):
            self._launch(group, self._part("gateway", gateway_nats, stop_s=self._settings.gateway.drain_s))
        base_url = f"{_local_url(self._settings)}/v1"
        tell(greeting.starting(base_url, self._catalog))
        await self._ready()
        self._proved.set()
        tell(greeting.ready(base_url, self._catalog, has_keys=bool(self._settings.gateway.api_keys)))

    async def _start_nats(self, group: asyncio.TaskGroup) -> tuple[NatsSettings, NatsSettings]:
        """How gateway and worker reach NATS: ours, once it listens, or the one that is configured."""
        nats = self._settings.nats
        if nats.url:
            return nats, nats
        port = free_port()
        plan = plan_server(
            state_dir=self._run_dir.parent,
            queue=self._settings.queue,
            port=port,
            connect_timeout_s=nats.connect_timeout_s,
        )
        # Written before each start: the state directory may have been emptied meanwhile.
        self._launch(group, Part("NATS server", plan.argv, environment({}), NATS_STOP_S, prepare=plan.write))
        await _listening(port, within_s=NATS_START_S)
        return plan.gateway, plan.node

    def _launch(self, group: asyncio.TaskGroup, part: Part) -> None:
        child = Child(part, metrics_dir=self._metrics_dir, proved=self._proved)
        self._children.append(child)
        group.create_task(child.run(), name=part.name)

    def _part(self, name: str, nats: NatsSettings, *, stop_s: float) -> Part:
        changes = {
            variable_of("nats.url"): nats.url,
            variable_of("nats.user"): nats.user,
            variable_of("nats.password"): nats.password,
            MULTIPROCESS_VARIABLE: str(self._metrics_dir),
        }
        command = (sys.executable, "-m", "appliance", name, *self._config)
        return Part(
            name, command, environment({key: value for key, value in changes.items() if value}), stop_s + STOP_MARGIN_S
        )

    async def _ready(self) -> None:
        """Return when a gateway says that every model has answered; say what is missing when that takes long."""
        gateway = self._settings.gateway
        loop = asyncio.get_running_loop()
        speak_s = loop.time() + SLOW_START_S
        while (missing := await _unready(_reachable(gateway.host), gateway.port)) is not None:
            if loop.time() >= speak_s:
                tell(f"still starting: {missing}")
                speak_s = loop.time() + SLOW_START_S
            await asyncio.sleep(READY_POLL_S)

    async def _stop(self) -> None:
        """Gateways, then the worker, then NATS. A second signal stops everything at once."""
        again = stop_signals()
        stopping = asyncio.create_task(self._stop_in_order())
        hurry = asyncio.create_task(again.wait())
        await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
        for task in (stopping, hurry):
            task.cancel()
        for child in self._children:
            child.kill()

    async def _stop_in_order(self) -> None:
        for child in reversed(self._children):
            await child.stop()


def check_port(host: str, port: int) -> None:
    """Raises StartupError when the port is taken, before anything is started."""
    family, address = address_of(host, port)
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            raise StartupError(
                f"gateway.port {port} on {host} cannot be used: {error.strerror}; stop what holds it "
                "(`appliance doctor` tells) or set APPLIANCE_PORT to another port"
            ) from error


@contextlib.contextmanager
def _own(state_dir: Path) -> Iterator[Path]:
    """This appliance's folder for sockets and run-time files; no other appliance may use it at the same time."""
    run_dir = state_dir.absolute() / "run"
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(run_dir / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StartupError(f"state_dir {state_dir} cannot be written: {error.strerror}; choose another") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StartupError(
            f"another appliance runs on state_dir {state_dir}; stop it, or set APPLIANCE_STATE_DIR to another folder"
        ) from error
    try:
        yield run_dir
    finally:
        os.close(lock)


def _emptied(folder: Path) -> Path:
    """The folder, new: the figures of processes that are gone are no longer ours."""
    try:
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700, parents=True)
    except OSError as error:
        raise StartupError(f"{folder} cannot be emptied: {error.strerror}; remove it") from error
    return folder


async def _listening(port: int, *, within_s: float) -> None:
    """Return when the loopback port takes connections."""
    try:
        async with asyncio.timeout(within_s):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection(HOST, port)
                    writer.close()
                    return
                await asyncio.sleep(0.01)
    except TimeoutError as error:
        raise StartupError(
            f"the NATS server does not listen after {within_s:.0f} s; see nats.log in the state directory"
        ) from error


def _local_url(settings: Settings) -> str:
    host = _reachable(settings.gateway.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{settings.gateway.port}"


def _reachable(host: str) -> str:
    """Where this machine reaches a gateway that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104  # compared, not bound


async def _unready(host: str, port: int) -> str | None:
    """None when all is ready, else what is missing. Within two seconds.

    On asyncio's own streams, since a client library's threads would make forking the children unsafe.
    """
    try:
        async with asyncio.timeout(POLL_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(
                    b"GET /readyz HTTP/1.1\r\nhost: appliance\r\nuser-agent: %s\r\nconnection: close\r\n\r\n"
                    % SUPERVISOR
                )
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return "the gateway does not answer yet"
    return None if head.startswith(b"HTTP/1.1 200") else body.decode(errors="replace")
