"""The environments that the vendors' clients live in, made on first use and kept until their pins change.

Clients have competing requirements: the 2.x and 3.x lines of OpenAI's, the 5.x and 7.x lines of Cohere's. So each line
of Python clients has a virtual environment of its own under `.appliance/sdk/`, and Node's have `node/node_modules`. All
versions are pinned, those of dependencies too, so nothing is resolved and an environment is the same everywhere.

    python -m tests.sdk.installed [NAME ...]    makes these or all of them, and says how long each took
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

FOLDER = Path(__file__).parent
MADE = FOLDER.parents[1] / ".appliance" / "sdk"
NODE = FOLDER / "node"
PYTHON_ENVIRONMENTS = tuple(sorted(path.stem for path in (FOLDER / "environments").glob("*.txt")))
INSTALL_S = 1200.0
NODE_MAJOR_MIN = 20
PATIENCE = {
    "PIP_RETRIES": "2",
    "PIP_TIMEOUT": "30",
    "npm_config_fetch_retries": "2",
    "npm_config_fetch_retry_mintimeout": "1000",
    "npm_config_fetch_retry_maxtimeout": "5000",
}
# What pip and npm print when there is no registry to reach; anything else that fails is an error.
OFFLINE = (
    "Failed to establish a new connection",
    "Temporary failure in name resolution",
    "Name or service not known",
    "Network is unreachable",
    "ConnectTimeoutError",
    "ENOTFOUND",
    "EAI_AGAIN",
    "ECONNREFUSED",
    "ENETUNREACH",
    "ETIMEDOUT",
)

made_s: dict[str, float] = {}  # how long the environments took that were made by this process


class Unavailable(Exception):
    """The environment cannot be had on this machine; says why."""


def python_environment(name: str) -> Path:
    """The interpreter of `environments/<name>.txt`'s environment.

    Raises Unavailable without a registry, CalledProcessError if the installation fails with one.
    """
    folder = MADE / name
    pins = FOLDER / "environments" / f"{name}.txt"
    interpreter = folder / "bin" / "python"
    with _made_once(name, folder / "made", [pins], salt=sys.version) as is_made:
        if not is_made:
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", "--without-pip", folder])
            pip: list[str | Path] = [
                sys.executable,
                "-m",
                "pip",
                "--python",
                interpreter,
                "--disable-pip-version-check",
                "--quiet",
            ]
            # The pins are complete, so nothing is resolved. Most modules are never imported: none is compiled ahead.
            _run([*pip, "install", "--no-deps", "--no-compile", "--requirement", pins])
            _run([*pip, "check"])
    return interpreter


def node_environment() -> str:
    """The path of `node`, with the packages of `node/package-lock.json` installed beside the tests.

    Raises Unavailable without Node, npm or a registry, CalledProcessError if the installation fails with them.
    """
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        raise Unavailable("Node.js and npm are not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < NODE_MAJOR_MIN:
        raise Unavailable(f"Node.js {version} is too old for the clients, which need {NODE_MAJOR_MIN}")
    pins = [NODE / "package.json", NODE / "package-lock.json"]
    with _made_once("node", NODE / "node_modules" / ".made", pins, salt=version) as is_made:
        if not is_made:
            _run([npm, "ci", "--prefix", NODE, "--ignore-scripts", "--no-audit", "--no-fund"])
    return node


@contextmanager
def _made_once(name: str, stamp: Path, pins: Sequence[Path], *, salt: str) -> Iterator[bool]:
    """Whether it is made already, of these pins; if not, it is once the block ends. One process at a time."""
    digest = hashlib.sha256(salt.encode() + b"".join(path.read_bytes() for path in pins)).hexdigest()
    MADE.mkdir(parents=True, exist_ok=True)
    with (MADE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_made = stamp.exists() and stamp.read_text() == digest
        started_s = time.monotonic()
        yield is_made
        if not is_made:
            stamp.write_text(digest)
            made_s[name] = time.monotonic() - started_s


def _run(command: Sequence[str | Path]) -> None:
    result = subprocess.run(
        command,
        env={**os.environ, **PATIENCE},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=INSTALL_S,
        check=False,
    )
    if result.returncode == 0:
        return
    if any(sign in result.stdout for sign in OFFLINE):
        raise Unavailable(f"no package registry was reached by {' '.join(map(str, command[:4]))} ...")
    print(result.stdout)
    result.check_returncode()


def main(names: Sequence[str]) -> None:
    """Make those of these names, or all."""
    for name in names or ("node", *PYTHON_ENVIRONMENTS):
        if name == "node":
            node_environment()
        else:
            python_environment(name)
    for name, seconds in made_s.items():
        print(f"{name}: made in {seconds:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
