"""The jobs that are open on this node, and how each is settled: answered first, acknowledged after.

Every open job ends in exactly one of: answered (`Done` or `Failed`), dropped because nobody waits, given back, buried.
A reply that cannot be sent leaves its job unacknowledged, so the queue delivers it again.
"""

import contextlib
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import assert_never

from appliance import telemetry
from appliance.errors import ApplianceError, BadVector, BodyTooLarge, DeadlinePassed, QueueUnavailable, Undeliverable
from appliance.jobs import (
    Beat,
    Delta,
    Done,
    Event,
    Failed,
    Job,
    Labels,
    Reply,
    Rows,
    Scores,
    Spans,
    SparseRows,
    Text,
    Tokenized,
    TokenRows,
    Weights,
    encode_replies,
    is_canary,
)
from appliance.queue.base import Delivery, NodeQueue
from appliance.queue.subjects import ALL_GATEWAYS
from appliance.workers.cancelled import Cancelled
from appliance.workers.open_job import PART_BYTES_MAX, Item, OpenJob
from appliance.workers.read_job import FLOAT_BYTES, Reading
from appliance.workers.wire import Encoded

REPLIES_BYTES_MAX = 768 * 1024  # of one message; below the 1 MiB that servers take by default
REPLY_OVERHEAD_BYTES = 256
INDEX_BYTES = 5
SPAN_BYTES = 64
CALL_BYTES = 16
ANNOUNCE_S = 1.0  # between two words to all gateways about one model
CANDIDATE_BYTES = 32  # a token's bytes, as a rule a few, and its number

_log = logging.getLogger(__name__)


class Ledger:
    """Open jobs, by identity: a resubmitted job may be open twice, and each delivery owes its own settlement."""

    def __init__(self, queue: NodeQueue, *, on_work_done: Callable[[str, float], None]) -> None:
        """`on_work_done(model, work_ms)` hears of predicted work that no device has to do any more."""
        self._queue = queue
        self._on_work_done = on_work_done
        self._open: set[OpenJob] = set()
        self._announced_s: dict[str, float] = {}
        self.cancelled = Cancelled()

    def __len__(self) -> int:
        return len(self._open)

    def open(self, job: Job, delivery: Delivery) -> OpenJob:
        """A job was delivered; from now on it is extended until it is settled."""
        now_s = time.monotonic()
        opened = OpenJob(job, delivery, arrived_s=now_s, extended_s=now_s)
        self._open.add(opened)
        return opened

    def is_live(self, item: Item) -> bool:
        """Whether anybody still waits for the item's job, in time."""
        return self.is_wanted(item.owner)

    def is_wanted(self, job: OpenJob) -> bool:
        """Whether anybody still waits for the job, in time."""
        return not job.is_settled and job.job.id not in self.cancelled and job.job.deadline_s > time.time()

    async def take(self, batch: Sequence[Item], encoded: Encoded) -> None:
        """Hand a batch's rows to their jobs, and answer those that are now complete."""
        counts = encoded.counts or (1,) * len(batch)
        if fault := rows_fault(batch, encoded, counts):
            await self._fail_all(batch, fault)
            return
        rows, width = memoryview(encoded.rows), encoded.width
        end = 0
        done_ms = 0.0
        bad: list[Item] = []
        complete: list[OpenJob] = []
        for number, (item, count) in enumerate(zip(batch, counts, strict=True)):
            start, end = end, end + FLOAT_BYTES * width * count
            owner = item.owner
            if owner.is_settled:
                continue
            owner.cost_left_ms -= item.cost_ms
            done_ms += item.cost_ms
            if number in encoded.bad:
                bad.append(item)
            elif owner.take(item.position, rows[start:end], width=width):
                complete.append(owner)
        self._on_work_done(batch[0].owner.job.model, done_ms)
        for item in bad:
            await self.fail(item, BadVector("the model gave numbers that are not finite, or a vector that is zero"))
        await self._complete(complete)

    async def answer(self, job: OpenJob, reading: Reading) -> None:
        """Answer a job that needs no device."""
        assert not reading.items, "a device has to compute it"
        job.begin(reading, lambda tokens: 0.0)
        await self._complete([job])

    async def fail(self, item: Item, error: ApplianceError) -> None:
        """The item's job fails, and the client is told which input it was."""
        name = item.owner.name_of(item.position)
        named = ApplianceError.restore(
            error.code, f"{name}: {error.message}", param=name, retry_after_s=error.retry_after_s
        )
        await self.refuse(item.owner, named)

    async def refuse(self, job: OpenJob, error: ApplianceError) -> None:
        """The whole job fails with this error."""
        if not job.is_settled:
            await self._answer([(job, job.refusal(error))], outcome=error.code)

    async def drop(self, items: Iterable[Item]) -> None:
        """Settle the jobs of items that are not live."""
        for job in {item.owner for item in items}:
            await self.drop_job(job)

    async def drop_job(self, job: OpenJob) -> None:
        """Settle a job that is not wanted: silently if its client is gone, with `DeadlinePassed` if it is late."""
        if job.is_settled:
            return
        if job.job.id in self.cancelled:
            await self.close(job, outcome="cancelled")
        else:
            late = DeadlinePassed("the deadline passed while the request waited for a device; try again later")
            await self.refuse(job, late)

    async def bury(self, job: OpenJob, reason: str) -> None:
        """The job was delivered too often, or cannot be read: move it to the dead letters and tell the client."""
        self.forget(job, outcome="buried")
        if await bury(job.delivery, f"job {job.job.id}: {reason}", model=job.job.model):
            await self.send([(job, job.refusal(Undeliverable(f"the request could not be served: {reason}")))])

    async def extend(self, *, age_s: float) -> None:
        """Tell the queue that jobs not heard of for `age_s` are still being worked on."""
        now_s = time.monotonic()
        for job in [job for job in self._open if now_s - job.extended_s >= age_s]:
            job.extended_s = now_s
            await job.delivery.extend()

    async def give_back(self, job: OpenJob) -> None:
        """The job goes to whoever pulls next."""
        self.forget(job, outcome="given back")
        await job.delivery.give_back()

    async def give_back_all(self) -> None:
        """This node stops."""
        for job in list(self._open):
            await self.give_back(job)

    async def _complete(self, jobs: Sequence[OpenJob]) -> None:
        """Answer jobs whose items are all computed; one whose numbers make no answer fails by itself."""
        part_bytes_max = min(PART_BYTES_MAX, self._message_bytes_max - REPLY_OVERHEAD_BYTES)
        answers: list[tuple[OpenJob, list[Reply]]] = []
        for job in jobs:
            try:
                replies = job.answer(part_bytes_max=part_bytes_max)
                self._check_size(replies)
                answers.append((job, replies))
            except ApplianceError as error:
                await self.refuse(job, error)
        await self._answer(answers, outcome="done")

    def _check_size(self, replies: Sequence[Reply]) -> None:
        """Raises BodyTooLarge for a reply that no message can carry: its job would be delivered again and again."""
        size = max(REPLY_OVERHEAD_BYTES + _size_bytes(reply.event) for reply in replies)
        if size > self._queue.payload_bytes_max:
            raise BodyTooLarge(
                f"the answer to one input has {size} B, the message server takes {self._queue.payload_bytes_max}; send "
                "shorter inputs, or raise the server's `max_payload`",
                param="input",
            )

    async def _fail_all(self, batch: Sequence[Item], fault: str) -> None:
        for job in {item.owner for item in batch}:
            await self.refuse(job, BadVector(fault))

    async def _answer(self, answers: Sequence[tuple[OpenJob, list[Reply]]], *, outcome: str) -> None:
        if await self.send(answers):
            for job, _ in answers:
                await self.close(job, outcome=outcome)
        else:
            for job, _ in answers:
                self.forget(job, outcome="unanswered")

    async def send(self, answers: Sequence[tuple[OpenJob, list[Reply]]]) -> bool:
        """Send the replies, those for one gateway together; False when the queue is out of reach."""
        by_gateway: dict[str, list[Reply]] = defaultdict(list)
        for job, replies in answers:
            by_gateway[job.job.reply_to].extend(replies)
        try:
            for reply_to, replies in by_gateway.items():
                for message in messages(replies, bytes_max=self._message_bytes_max):
                    await self._queue.reply(reply_to, encode_replies(message))
        except ApplianceError as error:
            models = ", ".join(sorted({job.job.model for job, _ in answers}))
            _log.warning(
                "replies to %d jobs of %s were not sent: %s; those not begun are delivered again",
                len(answers),
                models,
                error,
            )
            return False
        await self._announce({job.job.model for job, replies in answers if not isinstance(replies[-1].event, Failed)})
        return True

    async def _announce(self, models: Iterable[str]) -> None:
        """Tell all gateways what answers one of them: their canaries may wait behind another's work."""
        now_s = time.monotonic()
        due = [model for model in models if self._announced_s.get(model, 0.0) + ANNOUNCE_S <= now_s]
        if due:
            self._announced_s.update(dict.fromkeys(due, now_s))
            beats = [Reply("", 0, 0, Beat(model)) for model in due]
            with contextlib.suppress(QueueUnavailable):  # then they hear nothing from anybody
                await self._queue.reply(ALL_GATEWAYS, encode_replies(beats))

    @property
    def _message_bytes_max(self) -> int:
        return min(REPLIES_BYTES_MAX, self._queue.payload_bytes_max)

    async def close(self, job: OpenJob, *, outcome: str) -> None:
        """The job is answered, or as good as that: the queue may forget it."""
        self.forget(job, outcome=outcome)
        await job.delivery.ack()

    async def acknowledge(self, job: OpenJob) -> None:
        """The queue may forget a job that is not over: its client has seen a part. `ended` says how it ends."""
        self._settle(job)
        await job.delivery.ack()

    def forget(self, job: OpenJob, *, outcome: str) -> None:
        """Settled here; unless it is acknowledged too, it is delivered again."""
        self._settle(job)
        self.ended(job, outcome=outcome)

    def ended(self, job: OpenJob, *, outcome: str) -> None:
        """Count it, once."""
        if job.is_counted or is_canary(job.job.id):
            return
        job.is_counted = True
        telemetry.JOBS.labels(job.job.model, outcome).inc()
        telemetry.NODE_SECONDS.labels(job.job.model).observe(time.monotonic() - job.arrived_s)

    def _settle(self, job: OpenJob) -> None:
        job.is_settled = True
        self._open.discard(job)
        self._on_work_done(job.job.model, job.cost_left_ms)
        job.cost_left_ms = 0.0


async def bury(delivery: Delivery, reason: str, *, model: str) -> bool:
    """Move a delivery to the dead letters; False when they are out of reach, and it will be delivered again."""
    try:
        await delivery.bury(reason)
    except ApplianceError as error:
        _log.warning("a delivery for %s cannot be buried now: %s", model, error.message)
        return False
    telemetry.DEAD_LETTERS.labels(model).inc()
    _log.error("a delivery for %s is buried: %s", model, reason)
    return True


def rows_fault(batch: Sequence[Item], encoded: Encoded, counts: Sequence[int]) -> str:
    """Why an engine's answer cannot be the one to this batch; "" when it can."""
    if len(counts) != len(batch):
        return f"{len(batch)} inputs came back as {len(counts)}"
    if encoded.width <= 0 or min(counts) < 0 or len(encoded.rows) != FLOAT_BYTES * encoded.width * sum(counts):
        return f"{len(batch)} inputs came back as {len(encoded.rows)} B of width {encoded.width}"
    for item, count in zip(batch, counts, strict=True):
        rows = item.content.rows
        wanted = 1 if rows == "one" else item.tokens if rows == "per_token" else count
        if count != wanted:
            return f"an input of {item.tokens} tokens came back as {count} rows, {wanted} were asked for"
    return ""


def messages(replies: Sequence[Reply], *, bytes_max: int = REPLIES_BYTES_MAX) -> list[list[Reply]]:
    """Pack replies, in order, into as few messages as the size limit allows; a larger one goes alone."""
    packed: list[list[Reply]] = [[]]
    size = 0
    for reply in replies:
        reply_bytes = REPLY_OVERHEAD_BYTES + _size_bytes(reply.event)
        if packed[-1] and size + reply_bytes > bytes_max:
            packed.append([])
            size = 0
        packed[-1].append(reply)
        size += reply_bytes
    return packed


def _size_bytes(event: Event) -> int:  # noqa: PLR0911, PLR0912  # a table
    """What of an event's size is not bounded by `REPLY_OVERHEAD_BYTES`."""
    match event:
        case Rows(data=data) | Scores(data=data):
            return len(data)
        case Done(truncated=truncated, space=space):
            return INDEX_BYTES * len(truncated) + len(space)
        case TokenRows(inputs=rows):
            return sum(INDEX_BYTES + len(row) for row in rows)
        case SparseRows(inputs=weights):
            return sum(2 * INDEX_BYTES + len(row.indices) + len(row.values) for row in weights)
        case Tokenized(ids=ids, pieces=pieces):
            return INDEX_BYTES * (len(ids) + len(pieces)) + sum(len(piece.encode()) for piece in pieces)
        case Text(text=text):
            return len(text.encode())
        case Labels(names=names, data=data):
            return len(data) + sum(map(len, names))
        case Spans(inputs=inputs):
            return SPAN_BYTES * sum(map(len, inputs))
        case Failed(message=message):
            return len(message.encode())
        case Delta() as delta:
            return delta_bytes(delta)
        case Weights(questions=questions):
            return sum(INDEX_BYTES + len(row) for row in questions)
        case Beat():
            return 0
        case _:
            assert_never(event)


def delta_bytes(delta: Delta) -> int:
    """About the bytes of a part of a text on its way."""
    texts = len(delta.text.encode()) + len(delta.reasoning.encode())
    calls = sum(CALL_BYTES + len(part.name.encode()) + len(part.arguments.encode()) for part in delta.calls)
    return texts + calls + sum(CANDIDATE_BYTES * (1 + len(chosen.top)) for chosen in delta.logprobs)
