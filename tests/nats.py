"""A real nats-server for tests: start, kill and restart on one port."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psutil
import pytest

from appliance.queue.server import HOST, find_server, free_port

START_S = 10.0


class NatsServer:
    """A server process of ours. `config` is appended to a minimal configuration with JetStream."""

    def __init__(self, folder: Path, *, config: str = "", port: int | None = None) -> None:
        self.port = port or free_port()
        self._folder = folder
        self._file = folder / "server.conf"
        self._file.write_text(
            f'listen: "{HOST}:{self.port}"\nmax_payload: 8388608\n'
            f'jetstream {{ store_dir: "{folder / "store"}", max_memory_store: 2GB, max_file_store: 8GB }}\n{config}\n'
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"nats://{HOST}:{self.port}"

    @property
    def pid(self) -> int:
        """The process, while it runs."""
        assert self._process is not None, "the server runs"
        return self._process.pid

    def start(self) -> None:
        """Start, and wait until it listens."""
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen([find_server(), "-c", self._file], stdout=log, stderr=log)
        deadline_s = time.monotonic() + START_S
        while not is_listening(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise AssertionError(f"nats-server did not start:\n{(self._folder / 'server.log').read_text()}")
            time.sleep(0.01)

    def freeze(self) -> None:
        """Stop it from running, with its sockets open."""
        assert self._process is not None, "the server runs"
        self._process.send_signal(signal.SIGSTOP)
        while psutil.Process(self._process.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.001)

    def thaw(self) -> None:
        """Let it run on."""
        assert self._process is not None, "the server is frozen"
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it as a crash does: SIGKILL."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self) -> None:
        """Kill it and start it on the same port: memory streams are gone, file streams stay."""
        self.kill()
        self.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


def is_listening(port: int) -> bool:
    """A server answers on this loopback port."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A server of the test's own: `.url`, `.kill()`, `.start()`, `.restart()`."""
    folder = tmp_path / "nats"
    os.makedirs(folder)
    with NatsServer(folder) as server:
        yield server
