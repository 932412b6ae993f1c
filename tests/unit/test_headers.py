"""What travels beside a payload."""

import pytest

from appliance.queue.headers import (
    HEADER_BYTES_MAX,
    Status,
    dead_headers,
    decode_status,
    is_unanswered,
    message_header,
)


def test_dead_letter_headers_fit_their_share_of_a_message() -> None:
    letter_id = "JOBS_INTERACTIVE.123456.1796094262177763549"
    headers = dead_headers(letter_id=letter_id, reason="€\r\n" * 10_000, model="模" * 500, attempt=3)
    assert len(headers) < HEADER_BYTES_MAX - 64
    assert headers.startswith(b"NATS/1.0\r\n")
    assert headers.endswith(b"\r\n\r\n")
    assert [line.partition(b": ")[0] for line in headers.split(b"\r\n")[1:-2]] == [
        b"Nats-Msg-Id",
        b"Appliance-Reason",
        b"Appliance-Model",
        b"Appliance-Attempt",
    ]


def test_a_plain_message_id_is_kept_and_others_are_hashed() -> None:
    assert message_header("job-1") == b"NATS/1.0\r\nNats-Msg-Id: job-1\r\n\r\n"
    hashed = {message_header(name) for name in ("a b", "a\nb", "ab ", "ü", "", "x" * 129, "\ud800")}
    assert len(hashed) == 7
    assert all(header.startswith(b"NATS/1.0\r\nNats-Msg-Id: sha256:") for header in hashed)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (
            b"NATS/1.0 408 Request Timeout\r\nNats-Pending-Messages: 15\r\nNats-Pending-Bytes: 0\r\n\r\n",
            Status(408, "Request Timeout", 15),
        ),
        (b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Consumer: 9\r\n\r\n", Status(100, "Idle Heartbeat", 0)),
        (b"NATS/1.0 409 Consumer Deleted\r\n\r\n", Status(409, "Consumer Deleted", 0)),
        (b"NATS/1.0 503\r\n\r\n", Status(503, "", 0)),
        (b"NATS/1.0\r\nNats-Msg-Id: x\r\n\r\n", Status(0, "", 0)),
        (b"NATS/1.0 408\r\nNats-Pending-Messages: many\r\n\r\n", Status(408, "", 0)),
        (b"", Status(0, "", 0)),
        (b"\xff\xfe", Status(0, "", 0)),
    ],
)
def test_status_lines(headers: bytes, status: Status) -> None:
    assert decode_status(headers) == status


def test_only_a_503_means_that_nobody_answers() -> None:
    assert is_unanswered(b"NATS/1.0 503\r\nNats-Subject: jobs.bulk.m\r\n\r\n")
    assert not is_unanswered(b"")
    assert not is_unanswered(b"NATS/1.0\r\nNats-Msg-Id: 503\r\n\r\n")
