"""Messages as NATS's protocol has them on the wire, both ways. Pure.

Read by position instead of by nats-py's regular expressions, which cost a small message several times as much.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

LINE_BYTES_MAX = 8192  # of a control line without an end; the longest is INFO's, which comes before all this
_SUBJECT = re.compile(r"[!-~]+")


class Message(NamedTuple):
    """What NATS delivered."""

    subject: bytes
    reply: bytes
    data: bytes
    headers: bytes  # empty where there are none


class FrameReader:
    """Cuts what the server sends into messages and other lines."""

    def __init__(self, on_message: Callable[[int, Message], None]) -> None:
        """`on_message` gets each message with the number of its subscription."""
        self._on_message = on_message
        self._held: list[bytes] = []  # of a frame that has not come whole
        self._missing_bytes = 0  # of it, at least

    def feed(self, data: bytes) -> list[bytes]:
        """Deliver the messages that are whole now, and return the lines that are no messages (PING, INFO, -ERR, …).

        Raises ValueError for what is not NATS's protocol.
        """
        if self._held:
            self._held.append(data)
            self._missing_bytes -= len(data)
            if self._missing_bytes > 0:
                return []
            data = b"".join(self._held)
            self._held = []
        lines: list[bytes] = []
        at = 0
        while (end := data.find(b"\r\n", at)) >= 0:
            line = data[at:end]
            if line.startswith((b"MSG ", b"HMSG ")):
                words = line.split()
                if len(words) < 4:
                    raise ValueError(f"{line[:200]!r} is no message's head")
                start = end + 2
                stop = start + int(words[-1])
                if stop + 2 > len(data):
                    self._hold(data[at:], missing_bytes=stop + 2 - len(data))
                    return lines
                has_headers = line.startswith(b"H")
                body = start + int(words[-2]) if has_headers else start
                reply = words[3] if len(words) == 5 + has_headers else b""
                self._on_message(int(words[2]), Message(words[1], reply, data[body:stop], data[start:body]))
                at = stop + 2
            else:
                lines.append(data[at : end + 2])
                at = end + 2
        if len(data) - at > LINE_BYTES_MAX:
            raise ValueError(f"a line of more than {LINE_BYTES_MAX} B")
        if at < len(data):
            self._hold(data[at:], missing_bytes=1)
        return lines

    def _hold(self, rest: bytes, *, missing_bytes: int) -> None:
        self._held = [rest]
        self._missing_bytes = missing_bytes


def publish_frame(subject: str, payload: bytes, *, reply: str = "", headers: bytes = b"") -> bytes:
    """A message to send. Raises ValueError for a subject or reply that would be read as something else."""
    if not _SUBJECT.fullmatch(subject) or (reply and not _SUBJECT.fullmatch(reply)):
        raise ValueError(f"{subject[:200]!r}, or its reply {reply[:200]!r}, is no subject")
    if headers:
        head = f"HPUB {subject} {reply} {len(headers)} {len(headers) + len(payload)}\r\n"
    else:
        head = f"PUB {subject} {reply} {len(payload)}\r\n"
    return b"".join((head.encode(), headers, payload, b"\r\n"))
