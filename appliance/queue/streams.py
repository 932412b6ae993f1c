"""What NATS is asked to keep, and the words of its JetStream API: streams, consumers, requests, answers. Pure data.

This is the one place that says how jobs are stored. Times are nanoseconds, as JetStream wants them.
"""

from typing import Literal, get_args

import msgspec

from appliance.errors import ApplianceError, BodyTooLarge, Overloaded, QueueUnavailable
from appliance.jobs import Lane
from appliance.queue.subjects import DEAD_PREFIX, JOBS_PREFIX, consumer_name, job_subject, stream_name
from appliance.settings import QueueSettings

API = "$JS.API"
ACK_PREFIX = b"$JS.ACK."
DEAD_STREAM = "DEAD"
LANES: tuple[Lane, ...] = get_args(Lane)

DUPLICATES_S = 120.0  # the same message id within this window stores one job
DEAD_AGE_MAX_S = 7 * 86400.0
ACK_PENDING_MAX = 16_384  # jobs of one consumer that nodes may hold unacknowledged, all nodes together
PULLS_WAITING_MAX = 4096  # pull requests of all nodes that one consumer keeps

ACK = b"+ACK"
IN_PROGRESS = b"+WPI"
_NANOSECONDS = 1_000_000_000


class StreamConfig(msgspec.Struct, frozen=True):
    """A stream, in JetStream's own field names."""

    name: str
    subjects: tuple[str, ...]
    retention: Literal["workqueue", "limits"]
    storage: Literal["memory", "file"]
    discard: Literal["new", "old"]
    max_bytes: int
    max_age: int
    duplicate_window: int
    num_replicas: int


class ConsumerConfig(msgspec.Struct, frozen=True):
    """A durable pull consumer, in JetStream's own field names."""

    durable_name: str
    name: str
    filter_subject: str
    ack_wait: int
    max_ack_pending: int
    max_waiting: int
    # Without a limit of its own the server never gives up on a job. The node compares `attempt` with
    # `queue.deliveries_max` and buries: only it has payload, reason and the client's address at hand.
    max_deliver: int = -1
    ack_policy: str = "explicit"
    deliver_policy: str = "all"
    replay_policy: str = "instant"


class CreateConsumer(msgspec.Struct, frozen=True):
    """The body of CONSUMER.CREATE; an empty action creates or updates, whichever is needed."""

    stream_name: str
    config: ConsumerConfig
    action: str = ""


class PullRequest(msgspec.Struct, frozen=True):
    """The body of CONSUMER.MSG.NEXT."""

    batch: int
    expires: int
    idle_heartbeat: int


class ApiError(msgspec.Struct, frozen=True):
    """How JetStream says no."""

    code: int = 0
    err_code: int = 0
    description: str = ""


class ApiAnswer(msgspec.Struct, frozen=True):
    """The part of any API answer, and of any PubAck, that we read."""

    error: ApiError | None = None


NAME_IN_USE = 10058  # the stream exists with other limits
NOT_FOUND = 10059  # the stream does not exist
NO_ROOM = frozenset({10028, 10047})  # JetStream's memory or storage is reserved already
_FULL = frozenset({10023, 10028, 10047})  # the server's memory or disk is used up
_STORE_FAILED = 10077  # "maximum bytes exceeded", or a disk error: the text tells
_MESSAGE_TOO_LARGE = 10054

_answers = msgspec.json.Decoder(ApiAnswer)


def decode_answer(data: bytes) -> ApiAnswer:
    """Raises `msgspec.DecodeError` (or its `ValidationError`) for something that is no JetStream answer."""
    return _answers.decode(data)


def streams(settings: QueueSettings) -> tuple[StreamConfig, ...]:
    """Every stream of the appliance: one work queue per lane, and the dead letters."""
    return (*(_lane_stream(lane, settings) for lane in LANES), _dead_stream(settings))


def consumer(lane: Lane, model: str, settings: QueueSettings) -> ConsumerConfig:
    """The durable consumer that all nodes holding the model share."""
    name = consumer_name(lane, model)
    return ConsumerConfig(
        durable_name=name,
        name=name,
        filter_subject=job_subject(lane, model),
        ack_wait=nanoseconds(settings.ack_wait_s),
        max_ack_pending=ACK_PENDING_MAX,
        max_waiting=PULLS_WAITING_MAX,
    )


def stream_subject(verb: Literal["CREATE", "UPDATE"], name: str) -> str:
    """Where a stream is created or updated."""
    return f"{API}.STREAM.{verb}.{name}"


def create_consumer_subject(lane: Lane, model: str) -> str:
    """Where the consumer of one model and lane is created or updated."""
    return f"{API}.CONSUMER.CREATE.{stream_name(lane)}.{consumer_name(lane, model)}.{job_subject(lane, model)}"


def consumer_info_subject(lane: Lane, model: str) -> str:
    """Where a consumer tells of itself."""
    return f"{API}.CONSUMER.INFO.{stream_name(lane)}.{consumer_name(lane, model)}"


def pull_subject(lane: Lane, model: str) -> str:
    """Where jobs of one model and lane are asked for."""
    return f"{API}.CONSUMER.MSG.NEXT.{stream_name(lane)}.{consumer_name(lane, model)}"


def nanoseconds(seconds: float) -> int:
    """Seconds as JetStream counts them."""
    return int(seconds * _NANOSECONDS)


def nak(delay_s: float) -> bytes:
    """Deliver this job again, after the delay."""
    return b'-NAK {"delay": %d}' % nanoseconds(delay_s) if delay_s > 0 else b"-NAK"


def term(reason: str) -> bytes:
    """Never deliver this job again."""
    return b"+TERM " + " ".join(reason.split()).encode()


def attempt_of(ack_subject: bytes) -> int:
    """How often the job has been delivered, this time included."""
    return int(_ack_tokens(ack_subject)[2])


def stored_id(ack_subject: bytes) -> str:
    """Names the stored job, the same on every delivery and after a restart of the server."""
    stream, _, _, sequence, _, stored, _ = (token.decode() for token in _ack_tokens(ack_subject))
    return f"{stream}.{sequence}.{stored}"


def _ack_tokens(ack_subject: bytes) -> list[bytes]:
    """Stream, consumer, deliveries, stream sequence, consumer sequence, time stored, pending.

    The subject is `$JS.ACK.` and these in nine tokens; servers with a domain put it and an account hash before them.
    """
    tokens = ack_subject.split(b".")
    return tokens[2:9] if len(tokens) == 9 else tokens[4:11]


def refusal(error: ApiError) -> ApplianceError:
    """JetStream's refusal of a publish, in our words."""
    full = error.err_code in _FULL or (error.err_code == _STORE_FAILED and "maximum" in error.description)
    if full:
        return Overloaded(f"the queue is full: {error.description}; retry later")
    if error.err_code == _MESSAGE_TOO_LARGE:
        return BodyTooLarge(f"the queue refused the job: {error.description}; send less in one request")
    return QueueUnavailable(f"the queue refused the job: {error.description} ({error.err_code}); retry later")


def _lane_stream(lane: Lane, settings: QueueSettings) -> StreamConfig:
    is_interactive = lane == "interactive"
    return StreamConfig(
        name=stream_name(lane),
        subjects=(f"{JOBS_PREFIX}.{lane}.*",),
        retention="workqueue",
        storage="memory" if is_interactive else "file",
        discard="new",
        max_bytes=settings.interactive_bytes_max if is_interactive else settings.bulk_bytes_max,
        max_age=nanoseconds(settings.job_age_max_s),
        duplicate_window=nanoseconds(min(DUPLICATES_S, settings.job_age_max_s)),  # the server refuses a longer one
        num_replicas=settings.replicas,
    )


def _dead_stream(settings: QueueSettings) -> StreamConfig:
    return StreamConfig(
        name=DEAD_STREAM,
        subjects=(f"{DEAD_PREFIX}.>",),
        retention="limits",
        storage="file",
        discard="old",
        max_bytes=settings.dead_bytes_max,
        max_age=nanoseconds(DEAD_AGE_MAX_S),
        duplicate_window=nanoseconds(DUPLICATES_S),
        num_replicas=settings.replicas,
    )
