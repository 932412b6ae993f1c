"""Vectors from the node's bytes to the client's JSON, without a Python float in between.

`rows` is float32 little-endian, `4 * width` bytes a vector. Both forms return something msgspec writes as a JSON value.
"""

import msgspec
import numpy as np
import orjson

FLOAT_BYTES = 4


def row(rows: bytes | memoryview, index: int, *, width: int) -> memoryview:
    """The bytes of one vector; no copy. msgspec writes a memoryview as a standard base64 string."""
    stride = FLOAT_BYTES * width
    return memoryview(rows)[index * stride : (index + 1) * stride]


def json_floats(row_bytes: memoryview) -> msgspec.Raw:
    """The vector as a JSON array, each number the shortest decimal that reads back as the same float32."""
    return msgspec.Raw(orjson.dumps(np.frombuffer(row_bytes, dtype="<f4"), option=orjson.OPT_SERIALIZE_NUMPY))
