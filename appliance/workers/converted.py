"""Models that come in GGUF, as folders of safetensors: converted once, kept, and checked at every start.

<cache>/converted/<digest of the file>/   the folder, with `converted.json`, which lists the digest of each file
"""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from appliance.errors import StartupError
from appliance.workers.digests import digest

FOLDER: Final = "converted"
MANIFEST: Final = "converted.json"
CONVERT_S_MAX: Final = 900.0
_VERSION: Final = 1  # of what a conversion does
_LAST_WORDS: Final = 3  # lines

_log = logging.getLogger(__name__)


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a conversion gave."""

    version: int
    sha256: dict[str, str]


def converted(file: Path, *, sha256: str, cache_dir: Path) -> Path:
    """The folder of a GGUF file whose digest was checked. Blocks; the first time for up to a minute.

    Raises `StartupError`.
    """
    folder = converted_folder(sha256, cache_dir=cache_dir)
    if not _is_whole(folder):
        _log.info("converting %s once, which takes a while", file.name)
        _convert(file, folder)
    return folder


def converted_folder(sha256: str, *, cache_dir: Path) -> Path:
    """Where the conversion of a file of this digest lies, or will."""
    return cache_dir.absolute() / FOLDER / sha256[:32]


def _is_whole(folder: Path) -> bool:
    """Whether every file of a finished conversion is there as it was written."""
    try:
        manifest = msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return False
    return manifest.version == _VERSION and all(
        os.path.isfile(folder / name) and digest(folder / name) == found for name, found in manifest.sha256.items()
    )


def _convert(file: Path, folder: Path) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="new-", dir=folder.parent) as place:
            made = Path(place, "model")
            _run(file, made)
            found = {path.name: digest(path) for path in sorted(made.iterdir()) if path.is_file()}
            (made / MANIFEST).write_bytes(msgspec.json.encode(Manifest(_VERSION, found)))
            shutil.rmtree(folder, ignore_errors=True)
            made.rename(folder)
    except OSError as exc:
        if _is_whole(folder):  # another process was faster
            return
        raise StartupError(f"{file.name} cannot be converted into {folder.parent}: {exc.strerror or exc}") from exc


def _run(file: Path, target: Path) -> None:
    command = [sys.executable, "-m", "appliance.workers.engines.gguf", str(file), str(target)]
    try:
        done = subprocess.run(  # noqa: S603  # our own module, on a file that was checked
            command, capture_output=True, text=True, timeout=CONVERT_S_MAX, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as exc:
        raise StartupError(f"{file.name} was not converted within {CONVERT_S_MAX:.0f} s") from exc
    if done.returncode:
        lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
        raise StartupError(f"{file.name} cannot be converted: {' | '.join(lines[-_LAST_WORDS:])[:500]}")
