"""The isolated environment of SGLang: where it lies, what it was built from, and whether it is complete.

`<state_dir>/engines/sglang` is a virtual environment. Its marker is written last, so a folder without one is an
installation that was cut short, and one with another lock's digest is of another release of the appliance.
"""

import hashlib
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import msgspec

Kind = Literal["cpu", "cuda"]
State = Literal["absent", "partial", "outdated", "ready"]

KINDS: Final[tuple[Kind, ...]] = ("cpu", "cuda")
MARKER: Final = "appliance-engine.json"
# Of SGLang itself. 0.5.20 closes the last remote hole that is known (CVE-2026-92972); the endpoints and the plugins
# that we use have been tried from 0.5.23 on.
VERSION_MIN: Final = (0, 5, 23)


class Installed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The marker's content."""

    kind: Kind
    version: str  # of SGLang
    lock_sha256: str


@dataclass(frozen=True)
class Environment:
    """One folder, which need not be there."""

    folder: Path

    @classmethod
    def of(cls, state_dir: str) -> "Environment":
        """The one of this appliance."""
        return cls(Path(state_dir, "engines", "sglang").absolute())

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def marker(self) -> Path:
        """What says that it is complete."""
        return self.folder / MARKER

    def installed(self) -> Installed | None:
        """What is there, None where nothing complete is."""
        try:
            return msgspec.json.decode(self.marker.read_bytes(), type=Installed)
        except (OSError, msgspec.DecodeError):  # which covers ValidationError
            return None

    def state(self) -> State:
        """Whether it can be used as it is."""
        installed = self.installed()
        if installed is None:
            return "partial" if self.folder.exists() else "absent"
        return "ready" if installed.lock_sha256 == lock_sha256(installed.kind) else "outdated"


def has_adapter_client() -> bool:
    """Whether this interpreter has what the adapter needs to speak to SGLang."""
    return importlib.util.find_spec("aiohttp") is not None


def lock_file(kind: Kind) -> Path:
    """The packages of one kind, each pinned."""
    return Path(__file__).with_name(f"requirements-{kind}.txt")


def lock_sha256(kind: Kind) -> str:
    """The digest that tells one lock from another."""
    return hashlib.sha256(lock_file(kind).read_bytes()).hexdigest()


def is_old(version: str) -> bool:
    """Whether a version of SGLang is below `VERSION_MIN`; one that cannot be read counts as old."""
    parts = version.split("+", maxsplit=1)[0].split(".")[:3]
    numbers = tuple(int(part) if part.isdecimal() else -1 for part in parts)
    return numbers < VERSION_MIN
