"""NATS's protocol, read however the socket cuts it."""

import pytest

from appliance.queue.frames import LINE_BYTES_MAX, FrameReader, Message, publish_frame

HEADERS = b"NATS/1.0\r\nNats-Msg-Id: x\r\n\r\n"
STREAM = (
    b"PING\r\n"
    b"MSG a.b 1 6\r\nMSG \r\n\r\n"
    b"MSG a.b 2 reply.to 0\r\n\r\n"
    b"+OK\r\n"
    + b"HMSG a 3 $JS.ACK.x %d %d\r\n%sbody\r\n" % (len(HEADERS), len(HEADERS) + 4, HEADERS)
    + b"HMSG a 4 %d %d\r\n%s\r\n" % (len(HEADERS), len(HEADERS), HEADERS)
    + b"-ERR 'no'\r\n"
)
MESSAGES = [
    (1, Message(b"a.b", b"", b"MSG \r\n", b"")),
    (2, Message(b"a.b", b"reply.to", b"", b"")),
    (3, Message(b"a", b"$JS.ACK.x", b"body", HEADERS)),
    (4, Message(b"a", b"", b"", HEADERS)),
]
LINES = [b"PING\r\n", b"+OK\r\n", b"-ERR 'no'\r\n"]


@pytest.mark.parametrize("step", [1, 2, 3, 7, 20, len(STREAM)])
def test_messages_and_lines_come_whole_however_they_are_cut(step: int) -> None:
    messages: list[tuple[int, Message]] = []
    reader = FrameReader(lambda number, message: messages.append((number, message)))

    lines = [line for at in range(0, len(STREAM), step) for line in reader.feed(STREAM[at : at + step])]

    assert messages == MESSAGES
    assert lines == LINES


def test_a_large_message_comes_in_parts() -> None:
    messages: list[Message] = []
    reader = FrameReader(lambda number, message: messages.append(message))
    payload = bytes(range(256)) * 4096
    stream = b"MSG a 1 %d\r\n%s\r\nPING\r\n" % (len(payload), payload)

    lines = [line for at in range(0, len(stream), 1000) for line in reader.feed(stream[at : at + 1000])]

    assert messages == [Message(b"a", b"", payload, b"")]
    assert lines == [b"PING\r\n"]


@pytest.mark.parametrize("stream", [b"MSG a one 5\r\nhello\r\n", b"MSG \r\n", b"x" * (LINE_BYTES_MAX + 1)])
def test_what_is_no_nats_is_told(stream: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  # Python's words for a number that is none, or ours
        FrameReader(lambda number, message: None).feed(stream)


@pytest.mark.parametrize(
    ("reply", "headers", "frame"),
    [
        ("", b"", b"PUB a.b  2\r\nhi\r\n"),
        ("r.1", b"", b"PUB a.b r.1 2\r\nhi\r\n"),
        ("r.1", HEADERS, b"HPUB a.b r.1 %d %d\r\n%shi\r\n" % (len(HEADERS), len(HEADERS) + 2, HEADERS)),
    ],
)
def test_frames_to_send(reply: str, headers: bytes, frame: bytes) -> None:
    assert publish_frame("a.b", b"hi", reply=reply, headers=headers) == frame


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB x 0\r\n", "a\tb", "ü"])
def test_a_subject_cannot_become_a_command(subject: str) -> None:
    with pytest.raises(ValueError, match="no subject"):
        publish_frame(subject, b"")
    with pytest.raises(ValueError, match="no subject"):
        publish_frame("a", b"", reply=subject or " ")
