"""The two forms of a body: JSON, and msgpack for clients that move vectors without text.

In msgpack a vector is raw little-endian bytes. An answer is one Struct for both forms, so it holds no `msgspec.Raw`
(JSON text inside msgpack would be corrupt) unless the form is known to be JSON.
"""

from typing import Literal

import msgspec

Format = Literal["json", "msgpack"]

CONTENT_TYPES: dict[Format, bytes] = {"json": b"application/json", "msgpack": b"application/msgpack"}

_json = msgspec.json.Encoder()
_msgpack = msgspec.msgpack.Encoder()


def format_of(media_type: bytes | None) -> Format:
    """What a `Content-Type` or `Accept` header names. Anything but msgpack is JSON: many clients name it wrongly."""
    return "msgpack" if media_type is not None and b"msgpack" in media_type.lower() else "json"


def encode(answer: object, form: Format) -> bytes:
    """`answer`, a Struct or builtins, in this form."""
    return _json.encode(answer) if form == "json" else _msgpack.encode(answer)
