"""What a model has to agree with when it is loaded: its own vectors in float32, by the reference implementation.

The reference (sentence-transformers, float32, on the CPU) takes seconds to import and to load, and its answer depends
on nothing but the files. So it is asked once, and the answer is kept in a small file under the digest of the files; an
engine that starts again only compares. A kept answer that is damaged is made anew.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

TEXTS: Final = (
    "a",
    "How do I reset my password?",
    "Der Vertrag kann mit einer Frist von drei Monaten zum Ende des Quartals gekündigt werden.",
    "東京の天気は明日も晴れるでしょう。 🙂 1,024.50 €",
    "def area(radius: float) -> float:\n    return 3.14159 * radius**2",
    "The committee met on Tuesday to discuss the budget for the coming year. After a long debate about the cost of "
    "the new library, the members agreed to postpone the decision until the figures of the last quarter are known. "
    * 3,
)
# Part of the key: a change of the texts, of the reference or of this format makes every kept answer void.
_VERSION: Final = "1"
_READ_BYTES: Final = 1024 * 1024
_WEIGHTS: Final = "*.safetensors"
_SETTINGS: Final = ("*.json", "*.txt", "*.model")

_log = logging.getLogger("appliance.engine")


class Golden(msgspec.Struct, frozen=True):
    """The token ids of the check texts, and the reference's answer to them: float32 little-endian, `width` a row.

    `second_starts` is as in `wire.Encode`.
    """

    version: str
    digest: str
    ids: tuple[bytes, ...]  # int32 little-endian
    rows: bytes
    width: int
    second_starts: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        digest: str,
        texts: Sequence[npt.NDArray[np.int32]],
        rows: npt.NDArray[np.float32],
        second_starts: Sequence[int] = (),
    ) -> "Golden":
        ids = tuple(text.astype("<i4").tobytes() for text in texts)
        return cls(_VERSION, digest, ids, rows.astype("<f4").tobytes(), int(rows.shape[1]), tuple(second_starts))

    def texts(self) -> list[npt.NDArray[np.int32]]:
        return [np.frombuffer(ids, dtype="<i4") for ids in self.ids]

    def matrix(self) -> npt.NDArray[np.float32]:
        """[rows, width]"""
        return np.frombuffer(self.rows, dtype="<f4").reshape(-1, self.width)


_decoder = msgspec.msgpack.Decoder(Golden)


def digest_of(folder: Path, *, purpose: str) -> str:
    """A name for everything in the folder that the answer depends on. Reads all of it."""
    digest = hashlib.sha256(f"{_VERSION} {purpose}".encode())
    paths = {path for pattern in (_WEIGHTS, *_SETTINGS) for path in folder.rglob(pattern) if path.is_file()}
    for path in sorted(paths):
        digest.update(f"\n{path.relative_to(folder).as_posix()} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            while block := file.read(_READ_BYTES):
                digest.update(block)
    return digest.hexdigest()


def kept(cache: Path, digest: str) -> Golden | None:
    """The answer kept for these files; None if there is none, or none that can be trusted."""
    path = _path(cache, digest)
    try:
        golden = _decoder.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as exc:
        _log.warning("the kept reference vectors cannot be read and are made anew: %s", exc)
        return None
    if not _is_sound(golden, digest):
        _log.warning("the kept reference vectors are damaged and are made anew")
        return None
    return golden


def keep(cache: Path, golden: Golden) -> None:
    """Keep the answer for the next start. A disk that is full or read-only costs time then, nothing else."""
    try:
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=cache, prefix=".golden-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.msgpack.encode(golden))
            Path(name).replace(_path(cache, golden.digest))
        except OSError:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as exc:
        _log.warning("the reference vectors cannot be kept: %s", exc)


def _path(cache: Path, digest: str) -> Path:
    return cache / f"{digest}.msgpack"


def _is_sound(golden: Golden, digest: str) -> bool:
    is_ours = golden.version == _VERSION and golden.digest == digest
    has_ids = bool(golden.ids) and all(ids and len(ids) % 4 == 0 for ids in golden.ids)
    has_rows = golden.width > 0 and len(golden.rows) % (4 * golden.width) == 0 and len(golden.rows) > 0
    has_starts = len(golden.second_starts) in {0, len(golden.ids)}
    return is_ours and has_ids and has_rows and has_starts and bool(np.isfinite(golden.matrix()).all())
