"""The queue in process, without NATS: the same ports and, held by the same contract suite, the same semantics.

For tests, and for a gateway and nodes in one process. Callbacks come from the event loop, never from inside a call.
"""

import asyncio
import contextlib
import itertools
import secrets
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Self

from appliance.errors import Overloaded, QueueUnavailable
from appliance.jobs import Cancel, Lane, encode_cancel
from appliance.queue.base import Delivery, GatewayListener, Pull, check_size
from appliance.queue.headers import HEADER_BYTES_MAX
from appliance.queue.streams import DUPLICATES_S, LANES
from appliance.queue.subjects import ALL_GATEWAYS, REPLY_PREFIX
from appliance.settings import QueueSettings

PAYLOAD_BYTES_MAX = 8 * 1024 * 1024 - HEADER_BYTES_MAX  # what the embedded NATS server takes


@dataclass(frozen=True)
class DeadLetter:
    """A job whose every delivery failed."""

    model: str
    lane: Lane
    attempt: int
    reason: str
    payload: bytes


class MemoryBroker:
    """Stands where the NATS server stands. Belongs to the event loop it is first used on."""

    def __init__(self, queue: QueueSettings | None = None, *, payload_bytes_max: int = PAYLOAD_BYTES_MAX) -> None:
        self.settings = queue or QueueSettings()
        self.payload_bytes_max = payload_bytes_max
        self.is_reachable = True
        self.dead_letters: deque[DeadLetter] = deque()  # oldest first, bounded by `dead_bytes_max`
        self.lanes = {lane: _Lane(lane, self) for lane in LANES}
        self.gateways: dict[str, MemoryGatewayQueue] = {}  # by reply address
        self.nodes: set[MemoryNodeQueue] = set()

    def gateway_queue(self, listener: GatewayListener) -> "MemoryGatewayQueue":
        """One gateway's face of this queue."""
        return MemoryGatewayQueue(self, listener)

    def node_queue(self) -> "MemoryNodeQueue":
        """One node's face of this queue."""
        return MemoryNodeQueue(self)

    def stop(self) -> None:
        """Go out of reach and lose the interactive jobs, as when the NATS server dies; bulk jobs stay."""
        self.is_reachable = False
        self.lanes["interactive"].clear()

    def start(self) -> None:
        """Come back, tell the gateways, and deliver what is there."""
        self.is_reachable = True
        for gateway in self.gateways.values():
            asyncio.get_running_loop().call_soon(gateway.listener.on_restored)
        for lane in self.lanes.values():
            lane.dispatch_all()

    def check(self, payload: bytes) -> None:
        """Raises `QueueUnavailable` between `stop` and `start`, and `BodyTooLarge`."""
        if not self.is_reachable:
            raise QueueUnavailable("the queue is stopped; retry later")
        check_size(payload, bytes_max=self.payload_bytes_max)

    def bury(self, letter: DeadLetter) -> None:
        """Keep a dead letter, dropping the oldest when there are too many."""
        self.dead_letters.append(letter)
        while sum(len(kept.payload) for kept in self.dead_letters) > self.settings.dead_bytes_max:
            self.dead_letters.popleft()


class MemoryGatewayQueue:
    """A gateway's face of the queue: see `base.GatewayQueue`."""

    def __init__(self, broker: MemoryBroker, listener: GatewayListener) -> None:
        self._broker = broker
        self.listener = listener
        self._reply_to = f"{REPLY_PREFIX}.{secrets.token_hex(16)}"

    async def __aenter__(self) -> Self:
        self._broker.gateways[self._reply_to] = self
        return self

    async def __aexit__(self, *error: object) -> None:
        del self._broker.gateways[self._reply_to]

    @property
    def reply_to(self) -> str:
        """This gateway's reply address, for `Job.reply_to`."""
        return self._reply_to

    @property
    def payload_bytes_max(self) -> int:
        """The largest job payload the broker takes."""
        return self._broker.payload_bytes_max

    @property
    def is_connected(self) -> bool:
        """False between the broker's `stop` and `start`."""
        return self._broker.is_reachable

    async def submit(self, *, job_id: str, message_id: str, model: str, lane: Lane, payload: bytes) -> None:
        """Store one job; a refusal comes to `GatewayListener.on_refused`."""
        self._broker.check(payload)
        try:
            self._broker.lanes[lane].store(message_id=message_id, model=model, payload=payload)
        except Overloaded as error:
            asyncio.get_running_loop().call_soon(self.listener.on_refused, job_id, error)

    async def cancel(self, job_ids: Sequence[str]) -> None:
        """Tell all nodes that nobody waits for these jobs."""
        if not self._broker.is_reachable:
            return
        payload = encode_cancel(Cancel(tuple(job_ids)))
        for node in self._broker.nodes:
            for callback in node.cancelled:
                asyncio.get_running_loop().call_soon(callback, payload)


class MemoryNodeQueue:
    """A node's face of the queue: see `base.NodeQueue`."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker
        self.cancelled: list[Callable[[bytes], None]] = []

    async def __aenter__(self) -> Self:
        self._broker.nodes.add(self)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._broker.nodes.discard(self)

    @property
    def payload_bytes_max(self) -> int:
        """The largest reply payload the broker takes."""
        return self._broker.payload_bytes_max

    def pull(
        self, *, model: str, lane: Lane, on_delivery: Callable[[Delivery], None]
    ) -> AbstractAsyncContextManager[Pull]:
        """Open the pull for one (model, lane). Nothing arrives before `want`."""
        return self._opened(_MemoryPull(self._broker.lanes[lane], model, on_delivery))

    @contextlib.asynccontextmanager
    async def _opened(self, pull: "_MemoryPull") -> AsyncIterator[Pull]:
        pulls = pull.lane.pulls[pull.model]
        pulls.append(pull)
        try:
            yield pull
        finally:
            pulls.remove(pull)

    async def reply(self, reply_to: str, payload: bytes) -> None:
        """Send one message straight to the gateway, which may have gone."""
        self._broker.check(payload)
        for address, gateway in self._broker.gateways.items():
            if reply_to in (address, ALL_GATEWAYS):
                asyncio.get_running_loop().call_soon(gateway.listener.on_replies, payload)

    def on_cancel(self, callback: Callable[[bytes], None]) -> None:
        """`callback` gets every `jobs.encode_cancel` payload that gateways send."""
        self.cancelled.append(callback)


class _MemoryPull:
    """A standing demand for the jobs of one model in one lane."""

    def __init__(self, lane: "_Lane", model: str, on_delivery: Callable[[Delivery], None]) -> None:
        self.lane = lane
        self.model = model
        self.on_delivery = on_delivery
        self.wish = 0

    async def want(self, jobs: int) -> None:
        """Ask for up to `jobs` more deliveries in all. 0 stops asking."""
        self.wish = max(0, jobs)
        self.lane.dispatch_soon(self.model)

    async def recall(self) -> None:
        """Take back what was asked for: nothing arrives until the next `want`."""
        self.wish = 0


@dataclass(slots=True, eq=False)
class _Stored:
    """A job in the queue. It waits in a line, or a node holds it and the timer runs, or it is gone."""

    sequence: int
    model: str
    payload: bytes
    stored_s: float
    attempt: int = 0
    timer: asyncio.TimerHandle | None = None

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class _Lane:
    """The work queue of one lane: bounded in bytes and age, de-duplicated, redelivering what is not settled."""

    def __init__(self, lane: Lane, broker: MemoryBroker) -> None:
        self.lane = lane
        self.broker = broker
        self.pulls: defaultdict[str, deque[_MemoryPull]] = defaultdict(deque)  # by model; the next to serve is first
        self._bytes_max = (
            broker.settings.interactive_bytes_max if lane == "interactive" else broker.settings.bulk_bytes_max
        )
        self._lines: defaultdict[str, deque[_Stored]] = defaultdict(deque)  # by model; undelivered jobs
        self._jobs: dict[int, _Stored] = {}  # all, oldest first
        self._bytes = 0
        self._seen: dict[str, float] = {}  # message id → when the window ends, oldest first
        self._sequences = itertools.count(1)

    def store(self, *, message_id: str, model: str, payload: bytes) -> None:
        """Store one job, unless its id was seen lately. Raises `Overloaded` when the lane is full."""
        now = asyncio.get_running_loop().time()
        self._expire(now)
        if message_id in self._seen:
            return
        if self._bytes + len(payload) > self._bytes_max:
            raise Overloaded(f"the queue is full: {self._bytes} B of {self._bytes_max} B; retry later")
        job = _Stored(next(self._sequences), model, payload, now)
        self._jobs[job.sequence] = job
        self._bytes += len(payload)
        self._seen[message_id] = now + DUPLICATES_S
        self._lines[model].append(job)
        self.dispatch_soon(model)

    def dispatch_soon(self, model: str) -> None:
        """Deliver what is wanted, from the event loop."""
        asyncio.get_running_loop().call_soon(self._dispatch, model)

    def dispatch_all(self) -> None:
        """Deliver what is wanted of every model."""
        for model in list(self._lines):
            self.dispatch_soon(model)

    def hold(self, job: _Stored) -> None:
        """A node has the job: start the ack wait, anew if it runs."""
        if job.sequence in self._jobs and job.timer is not None:
            job.stop_timer()
            self._redeliver_after(job, self.broker.settings.ack_wait_s)

    def give_back(self, job: _Stored, *, delay_s: float) -> None:
        """Deliver the job again after the delay."""
        if job.sequence in self._jobs and job.timer is not None:
            job.stop_timer()
            self._redeliver_after(job, delay_s)

    def remove(self, job: _Stored) -> bool:
        """Forget the job; False when it is gone already."""
        job.stop_timer()
        if self._jobs.pop(job.sequence, None) is None:
            return False
        self._bytes -= len(job.payload)
        return True

    def clear(self) -> None:
        """Lose everything."""
        for job in list(self._jobs.values()):
            self.remove(job)
        self._lines.clear()
        self._seen.clear()

    def _dispatch(self, model: str) -> None:
        self._expire(asyncio.get_running_loop().time())
        line, pulls = self._lines[model], self.pulls[model]
        while line and self.broker.is_reachable and (pull := _next_wishing(pulls)) is not None:
            job = line.popleft()
            if job.sequence not in self._jobs:
                continue
            job.attempt += 1
            pull.wish -= 1
            self._redeliver_after(job, self.broker.settings.ack_wait_s)
            pull.on_delivery(_MemoryDelivery(self, job))

    def _redeliver_after(self, job: _Stored, wait_s: float) -> None:
        job.timer = asyncio.get_running_loop().call_later(wait_s, self._redeliver, job)

    def _redeliver(self, job: _Stored) -> None:
        job.timer = None
        self._lines[job.model].appendleft(job)
        self._dispatch(job.model)

    def _expire(self, now: float) -> None:
        while self._seen and next(iter(self._seen.values())) <= now:
            del self._seen[next(iter(self._seen))]
        while self._jobs:
            oldest = next(iter(self._jobs.values()))
            if now - oldest.stored_s <= self.broker.settings.job_age_max_s:
                return
            self.remove(oldest)


class _MemoryDelivery:
    """One job in the hands of a node."""

    def __init__(self, lane: _Lane, job: _Stored) -> None:
        self._lane = lane
        self._job = job
        self._is_settled = False
        self.payload = job.payload
        self.attempt = job.attempt

    async def ack(self) -> None:
        """Remove the job."""
        if self._settle():
            self._lane.remove(self._job)

    async def extend(self) -> None:
        """Start the ack wait anew."""
        if not self._is_settled and self._lane.broker.is_reachable:
            self._lane.hold(self._job)

    async def give_back(self, *, delay_s: float = 0.0) -> None:
        """Deliver it again, to any node, after the delay."""
        if self._settle():
            self._lane.give_back(self._job, delay_s=delay_s)

    async def bury(self, reason: str) -> None:
        """Keep payload and reason as a dead letter, and remove the job."""
        self._lane.broker.check(b"")
        if self._settle() and self._lane.remove(self._job):
            self._lane.broker.bury(
                DeadLetter(self._job.model, self._lane.lane, self.attempt, reason, self._job.payload)
            )

    def _settle(self) -> bool:
        """Whether this settlement is the first, and reaches the broker."""
        is_first = not self._is_settled
        self._is_settled = True
        return is_first and self._lane.broker.is_reachable


def _next_wishing(pulls: deque[_MemoryPull]) -> _MemoryPull | None:
    """The next pull in turn that wants a job."""
    for _ in range(len(pulls)):
        pull = pulls[0]
        pulls.rotate(-1)
        if pull.wish > 0:
            return pull
    return None
