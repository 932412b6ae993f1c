"""The queue's ports: `GatewayQueue` is the face a gateway uses, `NodeQueue` the one a node uses.

Semantics, kept by every implementation and held by the contract suite in tests/contract:
- A job is stored before anything is acknowledged, delivered to one node at a time, and redelivered with a higher
  `attempt` when its node neither settles nor extends it within the ack wait.
- A full queue refuses at once (`Overloaded`); a queue that cannot be reached refuses with `QueueUnavailable`.
- Nothing here blocks on a slow peer: callbacks are plain functions that must not do I/O.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from appliance.errors import ApplianceError, BodyTooLarge
from appliance.jobs import Lane


def check_size(payload: bytes, *, bytes_max: int) -> None:
    """Raises BodyTooLarge for a message that the queue does not take."""
    if len(payload) > bytes_max:
        raise BodyTooLarge(f"a message of {len(payload)} B is over the queue's {bytes_max} B; send less at once")


class GatewayListener(Protocol):
    """What a gateway hears from its queue. Called on the event loop; must return at once."""

    def on_replies(self, payload: bytes) -> None:
        """`payload` is one message of `jobs.encode_replies`."""

    def on_refused(self, job_id: str, error: ApplianceError) -> None:
        """The queue did not take the job and will not: it is full, or stayed out of reach."""

    def on_restored(self) -> None:
        """The connection came back after a loss: submit again what is still wanted.

        Jobs that were queued or not yet confirmed, and replies in flight, may be gone; nothing is sent again by itself.
        """


class GatewayQueue(Protocol):
    """Submit jobs and hear their replies. Entered as an async context manager, which connects and creates streams."""

    @property
    def reply_to(self) -> str:
        """This gateway's reply address, for `Job.reply_to`."""

    @property
    def payload_bytes_max(self) -> int:
        """The largest job payload the server takes, as the server said."""

    @property
    def is_connected(self) -> bool:
        """False while the queue is out of reach."""

    async def submit(self, *, job_id: str, message_id: str, model: str, lane: Lane, payload: bytes) -> None:
        """Send one job; a refusal comes to `GatewayListener.on_refused`.

        `message_id` de-duplicates: the same id twice within the window stores one job. Raises `QueueUnavailable` when
        there is no connection, `Overloaded` when too many jobs are unconfirmed, `BodyTooLarge` over
        `payload_bytes_max`.
        """

    async def cancel(self, job_ids: Sequence[str]) -> None:
        """Tell all nodes that nobody waits for these jobs. Best effort: deadlines are the backstop."""


class Delivery(Protocol):
    """One job handed to this node. Exactly one of `ack`, `give_back` and `bury` settles it; a second one does nothing.

    A settlement that is lost with the connection leads to a redelivery, not to an error.
    """

    @property
    def payload(self) -> bytes:
        """The job, as submitted."""

    @property
    def attempt(self) -> int:
        """1 on the first delivery, one more on each redelivery."""

    async def ack(self) -> None:
        """Done with it, answered: remove the job."""

    async def extend(self) -> None:
        """Still at it: start the ack wait anew."""

    async def give_back(self, *, delay_s: float = 0.0) -> None:
        """Not done: deliver it again, to any node, after the delay."""

    async def bury(self, reason: str) -> None:
        """Move it to the dead-letter stream with its payload and the reason; it is not delivered again.

        Raises `QueueUnavailable` when the dead letter cannot be stored: the job is then redelivered, not lost.
        """


class Pull(Protocol):
    """A standing demand for the jobs of one model in one lane."""

    async def want(self, jobs: int) -> None:
        """Ask for up to `jobs` more deliveries in all, those still outstanding included. 0 stops asking."""

    async def recall(self) -> None:
        """Take back what was asked for: once it returns, nothing arrives until the next `want`.

        Costs a round trip and more: for a node that has too much, not for one that has enough.
        """


class NodeQueue(Protocol):
    """Pull jobs and answer them. Entered as an async context manager, which connects."""

    @property
    def payload_bytes_max(self) -> int:
        """The largest reply payload the server takes."""

    def pull(
        self, *, model: str, lane: Lane, on_delivery: Callable[[Delivery], None]
    ) -> AbstractAsyncContextManager[Pull]:
        """Open the pull for one (model, lane); creates the durable consumer. Nothing arrives before `want`."""

    async def reply(self, reply_to: str, payload: bytes) -> None:
        """Send one message of `jobs.encode_replies` straight to the gateway, or to all (`subjects.ALL_GATEWAYS`).

        At most once; never queued.

        Raises `QueueUnavailable` without a connection and `BodyTooLarge` over `payload_bytes_max`.
        """

    def on_cancel(self, callback: Callable[[bytes], None]) -> None:
        """`callback` gets every `jobs.encode_cancel` payload that gateways send."""
