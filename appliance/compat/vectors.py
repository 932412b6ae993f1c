"""Vectors from the node's bytes to the client's body, without a Python float in between.

A row of a body is a memoryview, which msgspec writes as base64 in JSON and as bytes in msgpack, or JSON text.
"""

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from appliance.errors import BadVector
from appliance.jobs import Part, Rows

FLOAT_BYTES = 4

VectorRow = memoryview | msgspec.Raw


def rows(parts: Sequence[Rows], *, is_text: bool) -> list[VectorRow]:
    """Every vector of the parts, in order; no copy of its bytes. Raises BadVector for parts of different widths."""
    found: list[VectorRow] = []
    for part in parts:
        if part.width != parts[0].width:
            raise BadVector("the parts of the request came back in different widths; try again")
        stride = FLOAT_BYTES * part.width
        data = memoryview(part.data)
        cut = [data[start : start + stride] for start in range(0, len(data), stride)]
        found += [json_floats(row) for row in cut] if is_text else cut
    return found


def matrix(parts: Sequence[Part]) -> npt.NDArray[np.float32]:
    """[inputs, width] of the dense parts, at least one. Raises BadVector for different widths, or what is no number."""
    dense = [part for part in parts if isinstance(part, Rows)]
    if len({part.width for part in dense}) != 1:
        raise BadVector("the parts of the request came back in different widths; try again")
    data = dense[0].data if len(dense) == 1 else b"".join(part.data for part in dense)
    found = np.frombuffer(data, "<f4").reshape(-1, dense[0].width)
    if not np.isfinite(found).all():
        raise BadVector("a vector came back with a number that is not finite; try again")
    return found


def array_rows(values: npt.NDArray[np.generic], *, is_text: bool) -> list[VectorRow]:
    """The rows of an array; as bytes they are little-endian, as nodes send them."""
    whole = np.ascontiguousarray(values)
    if is_text:
        return [msgspec.Raw(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY)) for row in whole]
    return [memoryview(row) for row in whole.view(np.uint8)]


def json_floats(data: bytes | memoryview) -> msgspec.Raw:
    """float32 as a JSON array, each number the shortest decimal that reads back as the same float32."""
    return msgspec.Raw(orjson.dumps(np.frombuffer(data, dtype="<f4"), option=orjson.OPT_SERIALIZE_NUMPY))


def json_integers(data: bytes | memoryview) -> msgspec.Raw:
    """int32 as a JSON array."""
    return msgspec.Raw(orjson.dumps(np.frombuffer(data, dtype="<i4"), option=orjson.OPT_SERIALIZE_NUMPY))
