"""Check a safetensors file before any loader sees it: its header may not point outside the file, overlap or lie.

Layout: 8 bytes little-endian header length, that many bytes of JSON, then the tensors' bytes without gaps. See
https://github.com/huggingface/safetensors for the format.
"""

import math
import struct
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
from msgspec import Meta

from appliance.errors import StartupError

HEADER_BYTES_MAX = 100_000_000  # the format's own limit
_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}

_Natural = Annotated[int, Meta(ge=0)]


class _Tensor(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_tensor = msgspec.json.Decoder(_Tensor).decode


class Weights(NamedTuple):
    """How much there is of a model."""

    bytes: int  # of the files
    numbers: int  # in them, each of which a device holds in the dtype of the tuning; 0: it holds the files as they are


NO_WEIGHTS: Final = Weights(0, 0)


def check_safetensors(path: Path) -> Weights:
    """What all tensors in the file come to. Raises `StartupError` for a file that is cut off, damaged or forged."""
    shapes, data_bytes = _read(path)
    return Weights(data_bytes, sum(math.prod(shape) for shape in shapes.values()))


def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors in the file, by name. Raises like `check_safetensors`."""
    return _read(path)[0]


def _read(path: Path) -> tuple[dict[str, tuple[int, ...]], int]:
    """The shapes, and how many bytes the tensors have. Raises `StartupError`."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            start = file.read(_LENGTH.size)
            length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else size
            data_bytes = size - _LENGTH.size - length
            if data_bytes < 0 or length > HEADER_BYTES_MAX:
                raise _refused(path, f"its header announces {length} B, the file has {size} B")
            header = file.read(length)
        return _checked_shapes(header, data_bytes), data_bytes
    except OSError as exc:
        raise StartupError(f"{path} cannot be read: {exc.strerror}") from exc
    except (msgspec.MsgspecError, ValueError) as exc:
        raise _refused(path, str(exc)) from exc


def _checked_shapes(header: bytes, data_bytes: int) -> dict[str, tuple[int, ...]]:
    """Of its tensors.

    Raises ValueError, or what msgspec raises, for a header that does not describe exactly `data_bytes` B.
    """
    tensors = {name: _decode_tensor(raw) for name, raw in _decode_header(header).items() if name != _METADATA}
    position = 0
    for name, tensor in sorted(tensors.items(), key=lambda item: item[1].data_offsets):
        begin, end = tensor.data_offsets
        if tensor.dtype not in _BITS:
            raise ValueError(f"tensor {name[:80]!r} has the unknown type {tensor.dtype[:20]!r}")
        if begin != position or end < begin:
            raise ValueError(f"tensor {name[:80]!r} lies at {begin}-{end} B, expected to begin at {position}")
        if math.prod(tensor.shape) * _BITS[tensor.dtype] != (end - begin) * 8:
            raise ValueError(f"tensor {name[:80]!r} of shape {tensor.shape} does not fill {end - begin} B")
        position = end
    if position != data_bytes:
        raise ValueError(f"its tensors take {position} B, the file holds {data_bytes} B of them")
    return {name: tensor.shape for name, tensor in tensors.items()}


def _refused(path: Path, reason: str) -> StartupError:
    return StartupError(f"{path} is no sound safetensors file: {reason}; delete it and get it again")
