"""What NATS is asked to keep, and how its answers read."""

import pytest

from appliance.errors import ApplianceError, BodyTooLarge, Overloaded, QueueUnavailable
from appliance.queue import streams
from appliance.queue.credentials import shown_url
from appliance.settings import QueueSettings


def test_streams_are_bounded_and_refuse_what_does_not_fit() -> None:
    settings = QueueSettings(interactive_bytes_max=2048, bulk_bytes_max=4096, dead_bytes_max=1024, replicas=3)
    interactive, bulk, dead = streams.streams(settings)

    assert (interactive.storage, bulk.storage, dead.storage) == ("memory", "file", "file")
    assert (interactive.max_bytes, bulk.max_bytes, dead.max_bytes) == (2048, 4096, 1024)
    assert (interactive.discard, bulk.discard, dead.discard) == ("new", "new", "old")
    assert (interactive.retention, bulk.retention, dead.retention) == ("workqueue", "workqueue", "limits")
    assert {config.num_replicas for config in (interactive, bulk, dead)} == {3}
    assert all(0 < config.duplicate_window <= config.max_age for config in (interactive, bulk, dead))


def test_the_duplicate_window_is_never_longer_than_jobs_are_kept() -> None:
    interactive, *_ = streams.streams(QueueSettings(job_age_max_s=30))
    assert interactive.duplicate_window == interactive.max_age == 30 * 10**9


def test_the_consumer_leaves_giving_up_to_the_node() -> None:
    consumer = streams.consumer("bulk", "a/b", QueueSettings(ack_wait_s=2.5))
    assert (consumer.ack_wait, consumer.max_deliver, consumer.ack_policy) == (2_500_000_000, -1, "explicit")
    assert consumer.filter_subject == "jobs.bulk.a=2Fb"


@pytest.mark.parametrize(
    ("subject", "attempt"),
    [
        (b"$JS.ACK.JOBS_BULK.bulk-m.1.7.9.1796094262177763549.8", 1),
        (b"$JS.ACK.JOBS_BULK.bulk-m.12.7.9.1796094262177763549.8", 12),
        (b"$JS.ACK.hub.ACCHASH.JOBS_BULK.bulk-m.3.7.9.1796094262177763549.8", 3),
        (b"$JS.ACK.hub.ACCHASH.JOBS_BULK.bulk-m.3.7.9.1796094262177763549.8.random", 3),
    ],
)
def test_the_attempt_is_in_the_ack_subject(subject: bytes, attempt: int) -> None:
    assert streams.attempt_of(subject) == attempt


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (streams.ApiError(503, 10077, "maximum bytes exceeded"), Overloaded),
        (streams.ApiError(503, 10077, "maximum messages exceeded"), Overloaded),
        (streams.ApiError(500, 10047, "insufficient storage resources available"), Overloaded),
        (streams.ApiError(500, 10028, "insufficient memory resources available"), Overloaded),
        (streams.ApiError(503, 10077, "write /data: input/output error"), QueueUnavailable),
        (streams.ApiError(503, 10008, "JetStream system temporarily unavailable"), QueueUnavailable),
        (streams.ApiError(400, 10054, "message size exceeds maximum allowed"), BodyTooLarge),
    ],
)
def test_refusals_in_our_words(error: streams.ApiError, kind: type[ApplianceError]) -> None:
    refusal = streams.refusal(error)
    assert type(refusal) is kind
    assert error.description in refusal.message


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b'{"stream":"T","seq":1}', None),
        (b'{"stream":"T","seq":1,"duplicate": true}', None),
        (b'{"error":{"code":503,"err_code":10077,"description":"maximum bytes exceeded"},"stream":"T","seq":0}', 10077),
    ],
)
def test_confirmations_decode(data: bytes, code: int | None) -> None:
    error = streams.decode_answer(data).error
    assert (error and error.err_code) == code


def test_every_delivery_of_one_stored_job_names_it_alike() -> None:
    first, second, other = map(
        streams.stored_id, (b"$JS.ACK.S.c.1.7.9.555.8", b"$JS.ACK.S.c.2.7.11.555.0", b"$JS.ACK.S.c.1.8.10.556.8")
    )
    assert first == second != other


def test_reasons_and_delays_as_jetstream_reads_them() -> None:
    assert streams.nak(0) == b"-NAK"
    assert streams.nak(1.5) == b'-NAK {"delay": 1500000000}'
    assert streams.term("broken\r\n twice") == b"+TERM broken twice"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://user:secret@host:4222", "nats://host:4222"),
        ("tls://token@a:1, nats://b:2", "tls://a:1, nats://b:2"),
        ("user:p@ss@host", "nats://host"),
    ],
)
def test_urls_are_shown_without_secrets(url: str, shown: str) -> None:
    assert shown_url(url) == shown
