"""What travels beside a payload: message ids, the notes on a dead letter, and the server's status lines. Pure."""

import hashlib
import re
from collections.abc import Iterable

import msgspec

HEADER_BYTES_MAX = 2048  # what our headers may add to a payload; the server's `max_payload` counts both
MESSAGE_ID = "Nats-Msg-Id"
REASON_CHARS_MAX = 300  # of a dead letter's reason, and below of its model name; at most four bytes each
MODEL_CHARS_MAX = 120

_PLAIN = re.compile(r"[!-~]{1,128}")
_NO_RESPONDERS = b"NATS/1.0 503"


class Status(msgspec.Struct, frozen=True):
    """A message of the server itself, instead of a payload."""

    code: int  # 100, 404, 408, 409 or 503; 0 for something that is no status
    text: str
    unserved: int  # how much of an ended pull request was never delivered; 0 where the server does not say


def message_header(message_id: str) -> bytes:
    """The header that de-duplicates. An id that a header could not carry faithfully is replaced by its hash."""
    if not _PLAIN.fullmatch(message_id):
        message_id = f"sha256:{hashlib.sha256(message_id.encode(errors='surrogatepass')).hexdigest()}"
    return _encoded([(MESSAGE_ID, message_id)])


def dead_headers(*, letter_id: str, reason: str, model: str, attempt: int) -> bytes:
    """What a dead letter says beside its payload; the same `letter_id` twice is stored once."""
    return _encoded(
        [
            (MESSAGE_ID, letter_id),
            ("Appliance-Reason", _one_line(reason)[:REASON_CHARS_MAX]),
            ("Appliance-Model", _one_line(model)[:MODEL_CHARS_MAX]),
            ("Appliance-Attempt", str(attempt)),
        ]
    )


def is_unanswered(headers: bytes) -> bool:
    """Nobody listens to the subject that a message went to."""
    return headers.startswith(_NO_RESPONDERS)


def decode_status(headers: bytes) -> Status:
    """The status in raw headers: `NATS/1.0 408 Request Timeout`, and lines of `Name: value`."""
    line, *fields = headers.decode("utf-8", "replace").split("\r\n")
    words = line.split(maxsplit=2)
    code = int(words[1]) if len(words) > 1 and words[1].isdecimal() else 0
    values = {name.strip(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
    unserved = values.get("Nats-Pending-Messages", "0")
    return Status(code, words[2] if len(words) > 2 else "", int(unserved) if unserved.isdecimal() else 0)


def _encoded(fields: Iterable[tuple[str, str]]) -> bytes:
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields)
    return f"NATS/1.0\r\n{lines}\r\n".encode(errors="replace")


def _one_line(text: str) -> str:
    return " ".join(text.split())
