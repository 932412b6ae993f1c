"""The weights of a model folder: from safetensors, each asked for by name and shape.

A weight that is asked for and is not there is an error, never a random number; what nobody asked for is named in the
log, except for the heads and buffers that checkpoints carry for other tasks.
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open

FILE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
# Parts of other tasks (pooler, language-model heads) and buffers that are computed, not loaded.
_OTHERS = re.compile(
    r"(^|\.)(pooler|cls|lm_head|mlm_head|classifier|score|head|decoder|predictions|position_ids|inv_freq)(\.|$)"
)

_log = logging.getLogger("appliance.engine")


class _Index(msgspec.Struct, frozen=True):
    weight_map: dict[str, str]


class Weights:
    """The tensors of one folder, read when they are taken, given out in one dtype on one device."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: torch.dtype,
        device: str,
        prefix: str = "",
        rename: Callable[[str], str] = lambda name: name,
    ) -> None:
        """`prefix` is what checkpoints with a head put before the encoder's names; `rename` gives a file's names ours.

        Raises ValueError for files that are missing or cannot be read.
        """
        self.dtype = dtype
        self.device = device
        self.bytes_taken = 0
        self._prefix = f"{prefix}." if prefix else ""
        self._sources: dict[str, tuple[safe_open, str]] = {}
        self._taken: set[str] = set()
        for path in _files(folder):
            try:
                source = safe_open(path, framework="pt")
                names = list(source.keys())  # type: ignore[no-untyped-call]
            except (OSError, SafetensorError) as exc:
                raise ValueError(f"the model's files cannot be loaded: {path.name}: {exc}") from exc
            for name in names:
                self._sources[rename(name)] = (source, name)

    def has(self, name: str) -> bool:
        """Whether the encoder has a weight of this name."""
        return self._found(name) is not None

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """The weight `name`, contiguous. Raises ValueError, naming it, if it is missing or has another shape."""
        found = self._found(name)
        if found is None:
            raise ValueError(f"the model's files lack the weight {name!r}")
        self._taken.add(found)
        source, stored_name = self._sources[found]
        try:
            tensor: torch.Tensor = source.get_tensor(stored_name)  # type: ignore[no-untyped-call]
        except SafetensorError as exc:
            raise ValueError(f"the weight {name!r} cannot be read: {exc}") from exc
        if tuple(tensor.shape) != shape:
            raise ValueError(f"the weight {name!r} has the shape {list(tensor.shape)}, not {list(shape)}")
        if not tensor.is_floating_point():
            raise ValueError(f"the weight {name!r} holds {tensor.dtype}, not floating point numbers")
        # A copy in any case: what is given out must not keep the file mapped.
        taken = tensor.to(device=self.device, dtype=self.dtype, copy=True).contiguous()
        self.bytes_taken += taken.numel() * taken.element_size()
        return taken

    def take_bias(self, name: str, size: int, *, is_used: bool) -> torch.Tensor | None:
        """A bias that the model's config switches on or off."""
        return self.take(name, size) if is_used else None

    def log_unused(self) -> None:
        """Name what the files hold and nobody took."""
        names = sorted(name for name in self._sources if name not in self._taken and not _OTHERS.search(name))
        if names:
            _log.warning("%d weights of the model's files are not used, %s among them", len(names), names[0])

    def _found(self, name: str) -> str | None:
        return next((full for full in (name, self._prefix + name) if full in self._sources), None)


def _files(folder: Path) -> list[Path]:
    if (folder / FILE_NAME).is_file():
        return [folder / FILE_NAME]
    if not (folder / INDEX_NAME).is_file():
        raise ValueError(f"the model's folder has no {FILE_NAME}")
    try:
        index = msgspec.json.decode((folder / INDEX_NAME).read_bytes(), type=_Index)
    except msgspec.DecodeError as exc:
        raise ValueError(f"{INDEX_NAME} cannot be read: {exc}") from exc
    names = sorted(set(index.weight_map.values()))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{INDEX_NAME} names the file {name!r}, which leaves the model's folder")
    return [folder / name for name in names]
