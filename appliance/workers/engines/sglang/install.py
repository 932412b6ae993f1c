"""Build and remove SGLang's environment. Blocks for minutes; `appliance engines` is the only caller.

What pip downloaded stays in its cache, so an installation that was cut short costs little to begin again: it is built
anew rather than mended. One process builds at a time.
"""

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import psutil

from appliance.errors import StartupError
from appliance.workers.engines.sglang.environment import (
    VERSION_MIN,
    Environment,
    Installed,
    Kind,
    is_old,
    lock_file,
    lock_sha256,
)
from appliance.workers.engines.sglang.launch import environment_of

GIB: Final = 2**30
DISK_BYTES: Final[dict[Kind, int]] = {"cpu": 4 * GIB, "cuda": 20 * GIB}  # with what pip unpacks meanwhile
TAIL_LINES: Final = 15
_OFFLINE = re.compile(
    r"NewConnectionError|Max retries exceeded|name resolution|Network is unreachable|Connection refused|ReadTimeout"
    r"|No matching distribution found|Could not find a version"
)
_FULL = "No space left on device"
# Only what a start imports; it fails where a package is missing, is not to be loaded here, or is of another version.
_TRIAL = "import sglang, sglang.srt.server_args, appliance_sglang; print(sglang.__version__)"


@dataclass(frozen=True)
class Step:
    """One command of an installation."""

    title: str
    command: tuple[str, ...]


def plan(kind: Kind, environment: Environment, *, python: str) -> list[Step]:
    """The commands that build it, in order. `python` is the interpreter that the environment is made of.

    torch comes first and with what it needs: which packages those are differs from one build of it to another. The
    rest is exactly the lock, whose pins are a whole: nothing is looked for beside it.
    """
    pip = (str(environment.python), "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar", "off")
    lock = lock_file(kind)
    torch = next(line for line in lock.read_text(encoding="utf-8").splitlines() if line.startswith("torch=="))
    return [
        Step("making the environment", (python, "-m", "venv", "--clear", str(environment.folder))),
        Step(f"installing {torch.partition(';')[0].strip()}", (*pip, torch)),
        Step("installing SGLang and the rest of its lock", (*pip, "--no-deps", "--requirement", str(lock))),
    ]


def install(kind: Kind, environment: Environment, *, say: Callable[[str], None], is_forced: bool = False) -> Installed:
    """Build it, unless it is complete and up to date. Raises `StartupError` that says what to do."""
    with _alone(environment):
        found = environment.installed()
        if found is not None and found.kind == kind and environment.state() == "ready" and not is_forced:
            say(f"SGLang {found.version} for {kind} is installed in {environment.folder}")
            return found
        check_unused(environment)
        _check_disk(kind, environment.folder.parent)
        environment.marker.unlink(missing_ok=True)
        for step in plan(kind, environment, python=sys.executable):
            say(f"{step.title} ...")
            _run(step)
        installed = Installed(kind, _tried(kind, environment), lock_sha256(kind))
        _write(environment.marker, msgspec.json.encode(installed))
        say(f"SGLang {installed.version} for {kind} is installed in {environment.folder}")
        return installed


def remove(environment: Environment) -> bool:
    """Delete it; False where there is none. Raises `StartupError` while it is in use."""
    with _alone(environment):
        if not environment.folder.exists():
            return False
        check_unused(environment)
        environment.marker.unlink(missing_ok=True)
        try:
            shutil.rmtree(environment.folder)
        except OSError as exc:
            raise StartupError(f"{exc.filename} cannot be removed: {exc.strerror}") from exc
        return True


def check_unused(environment: Environment) -> None:
    """Raises `StartupError` while a process runs from it: it would miss the files it has yet to import."""
    mine = str(environment.python)
    for process in psutil.process_iter(["pid", "cmdline"]):
        if (process.info["cmdline"] or [""])[0] == mine:
            raise StartupError(
                f"SGLang runs from {environment.folder} (pid {process.info['pid']}); stop the appliance first"
            )


def failure(step: Step, output: str, returncode: int) -> StartupError:
    """What a failed command means, in words that say what to do."""
    tail = "\n".join(output.splitlines()[-TAIL_LINES:])
    if _FULL in output:
        return StartupError(f"{step.title}: the disk is full; free some space and run it again\n{tail}")
    if _OFFLINE.search(output):
        return StartupError(
            f"{step.title}: the package index cannot be reached or lacks a package; check the network or pip's "
            f"settings (PIP_INDEX_URL, a proxy) and run it again\n{tail}"
        )
    return StartupError(f"{step.title}: the command ended with status {returncode}\n{tail}")


def _run(step: Step) -> None:
    tail: deque[str] = deque(maxlen=400)
    try:
        process = subprocess.Popen(  # noqa: S603 - commands of `plan`
            step.command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as exc:
        raise StartupError(f"{step.title}: {step.command[0]} cannot be run: {exc.strerror}") from exc
    with process:
        try:
            assert process.stdout is not None
            tail.extend(process.stdout)
        except BaseException:  # Ctrl-C: pip is not to go on by itself
            process.terminate()
            raise
    if process.returncode != 0:
        raise failure(step, "".join(tail), process.returncode)


def _tried(kind: Kind, environment: Environment) -> str:
    """The version of SGLang that really starts there. Raises `StartupError` where none does."""
    done = subprocess.run(  # noqa: S603 - our own interpreter
        (str(environment.python), "-c", _TRIAL),
        env=environment_of(kind, os.environ, threads=1),
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode != 0:
        raise failure(Step("trying SGLang", ()), done.stdout + done.stderr, done.returncode)
    version = done.stdout.strip().splitlines()[-1]
    if is_old(version):
        raise StartupError(f"SGLang {version} was installed, {'.'.join(map(str, VERSION_MIN))} or newer is needed")
    return version


def _check_disk(kind: Kind, folder: Path) -> None:
    free, wanted = shutil.disk_usage(folder).free, DISK_BYTES[kind]
    if free < wanted:
        raise StartupError(
            f"{folder} has {free / GIB:.1f} GiB free, SGLang for {kind} takes up to {wanted // GIB} GiB; free some "
            "space, or set `state_dir` to a larger disk"
        )


def _write(path: Path, content: bytes) -> None:
    """All of it or nothing."""
    unfinished = path.with_suffix(".new")
    unfinished.write_bytes(content)
    unfinished.replace(path)


@contextlib.contextmanager
def _alone(environment: Environment) -> Iterator[None]:
    """While no other process builds or removes it. Raises `StartupError` where one does."""
    folder = environment.folder.parent
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise StartupError(f"{folder} cannot be written: {exc.strerror}") from exc
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as exc:
        raise StartupError(f"another process installs or removes an engine in {folder}; wait for it") from exc
    finally:
        os.close(lock)
