"""Subject and consumer names. Model names are data: `BAAI/bge-m3` and `Qwen2.5-7B` are no NATS tokens as they stand.

A name is escaped byte by byte: letters, digits, `-` and `_` stay, every other UTF-8 byte becomes `=XX` (upper-case
hex). The result is valid as one subject token and inside a consumer name, is injective, and `unescape` inverts it.
"""

import hashlib
import re
from functools import lru_cache
from typing import Literal

from appliance.jobs import Lane

Role = Literal["gateway", "node"]  # who speaks; permissions differ

CANCEL_SUBJECT = "cancel"
REPLY_PREFIX = "replies"
ALL_GATEWAYS = f"{REPLY_PREFIX}.all"  # a reply address that every gateway listens to
JOBS_PREFIX = "jobs"
DEAD_PREFIX = "dead"
INBOX_PREFIX = "_INBOX"

_UNSAFE = re.compile(rb"[^A-Za-z0-9_-]")
_CONSUMER_CHARS_MAX = 255
_ESCAPED = re.compile(r"=([0-9A-F]{2})")


def escape(name: str) -> str:
    """`name` as one NATS token."""
    return _UNSAFE.sub(lambda found: b"=%02X" % found.group()[0], name.encode()).decode("ascii")


def unescape(token: str) -> str:
    """The inverse of `escape`."""
    return _ESCAPED.sub(lambda found: chr(int(found.group(1), 16)), token).encode("latin-1").decode()


@lru_cache(maxsize=4096)  # asked for with every job, of a few models
def job_subject(lane: Lane, model: str) -> str:
    """Where the jobs of one model and lane are stored."""
    return f"{JOBS_PREFIX}.{lane}.{escape(model)}"


def dead_subject(lane: Lane, model: str) -> str:
    """Where jobs go whose every delivery failed."""
    return f"{DEAD_PREFIX}.{lane}.{escape(model)}"


def stream_name(lane: Lane) -> str:
    """The stream that stores a lane."""
    return f"JOBS_{lane.upper()}"


def consumer_name(lane: Lane, model: str) -> str:
    """The durable consumer that all nodes holding the model share. A name too long for NATS ends in its hash."""
    name = f"{lane}-{escape(model)}"
    if len(name) <= _CONSUMER_CHARS_MAX:
        return name
    digest = hashlib.sha256(model.encode()).hexdigest()[:32]
    return f"{name[: _CONSUMER_CHARS_MAX - len(digest) - 1]}-{digest}"


def inbox_prefix(role: Role) -> str:
    """Where answers to one role's requests go; a role may listen to its own only."""
    return f"{INBOX_PREFIX}.{role}"
