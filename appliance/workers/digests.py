"""The digest of a file."""

import hashlib
from pathlib import Path
from typing import Final

from appliance.errors import StartupError

_READ_BYTES: Final = 1024 * 1024


def digest(path: Path) -> str:
    """The SHA-256 of a file in hex, read in pieces. Raises `StartupError` when it cannot be read."""
    sha = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while piece := file.read(_READ_BYTES):
                sha.update(piece)
    except OSError as exc:
        raise StartupError(f"{path} cannot be read: {exc.strerror}") from exc
    return sha.hexdigest()
