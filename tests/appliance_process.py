"""Runs the `appliance` command as a user does, and knows every process that comes of it."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx
import psutil

START_S = 90.0
STOP_S = 40.0
CONVERSION_S = 240.0  # of a first start with a model in GGUF


class ApplianceProcess:
    """One `appliance` command in a folder of its own. Its output is kept in `output`."""

    def __init__(
        self,
        folder: Path,
        arguments: Sequence[str] = ("up",),
        *,
        environ: Mapping[str, str] | None = None,
        config: str = "",
        python: Sequence[str] = (sys.executable,),
    ) -> None:
        """`python` runs the module: an interpreter with options, such as those of a profiler."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "appliance.toml").write_text(config)
        _share_conversions(folder)
        self.port = free_port()
        self.folder = folder
        self._output: list[str] = []
        mine = {name: value for name, value in os.environ.items() if not name.startswith("APPLIANCE_")}
        self.process = subprocess.Popen(
            [*python, "-m", "appliance", *arguments],
            cwd=folder,
            env={**mine, "APPLIANCE_PORT": str(self.port), "PYTHONUNBUFFERED": "1", **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        family = self.family()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_S)
        for survivor in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivor.kill()
        self.process.wait(STOP_S)
        self._reader.join(STOP_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def base_url(self) -> str:
        """For an OpenAI client."""
        return f"{self.url}/v1"

    @property
    def url(self) -> str:
        """Of the gateway."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def output(self) -> str:
        """All that it printed so far."""
        return "".join(self._output)

    def family(self) -> list[psutil.Process]:
        """The command and everything below it, now."""
        try:
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def child(self, word: str) -> psutil.Process:
        """The descendant whose command line has `word` in it."""
        found = [process for process in self.family() if word in " ".join(_command_line(process))]
        assert found, f"no process of {word!r} among {[_command_line(process) for process in self.family()]}"
        return found[0]

    def wait_for_line(self, text: str, *, within_s: float = START_S) -> None:
        """Until it prints `text`."""
        self.wait_until(lambda: text in self.output, within_s=within_s, what=f"the line {text!r}")

    def wait_ready(self, *, within_s: float = START_S) -> None:
        """Until /readyz says 200."""
        self.wait_until(lambda: status_of(f"{self.url}/readyz") == 200, within_s=within_s, what="readiness")

    def wait_until(self, is_true: Callable[[], bool], *, within_s: float, what: str) -> None:
        """Poll a condition, with a deadline and the output in the failure."""
        deadline_s = time.monotonic() + within_s
        while not is_true():
            assert self.process.poll() is None, f"it ended while waiting for {what}:\n{self.output}"
            assert time.monotonic() < deadline_s, f"no {what} in {within_s} s:\n{self.output}"
            time.sleep(0.05)

    def wait_ended(self) -> None:
        """After it exited: until all that it printed is in `output`."""
        self._reader.join(STOP_S)

    def metric(self, sample: str) -> float:
        """The sum of the samples that begin so in the gateway's /metrics; 0 when there is none."""
        return metric_at(self.port, sample)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Signal the command and wait for its exit code."""
        self.process.send_signal(number)
        return self.process.wait(STOP_S)

    def _read(self) -> None:
        assert self.process.stdout is not None
        self._output.extend(iter(self.process.stdout.readline, ""))


def _share_conversions(folder: Path) -> None:
    """Models in GGUF are converted once for all tests, which takes half a minute."""
    shared = Path(__file__).resolve().parent.parent / ".appliance" / "models" / "converted"
    shared.mkdir(parents=True, exist_ok=True)
    own = folder / ".appliance" / "models" / "converted"
    own.parent.mkdir(parents=True, exist_ok=True)
    if not own.exists():
        own.symlink_to(shared)


def metric_at(port: int, sample: str) -> float:
    """The sum of the samples that begin so in /metrics at this port."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(sample))


def status_of(url: str) -> int:
    """The status of a GET, 0 when nobody answers."""
    try:
        return httpx.get(url, timeout=5).status_code
    except httpx.HTTPError:
        return 0


def free_port() -> int:
    """A loopback port that is free at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_gone(processes: Sequence[psutil.Process], *, within_s: float) -> list[psutil.Process]:
    """Those still alive after the wait."""
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    return [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
