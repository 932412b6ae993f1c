"""Jobs that were sent to the queue and that it has not confirmed yet. Pure; time is passed in, in seconds."""

from dataclasses import dataclass

from appliance.errors import Overloaded

CONFIRM_WAIT_S = 2.0  # then a job is sent again, under the same message id
GIVE_UP_S = 10.0  # then it counts as refused
JOBS_MAX = 16_384
BYTES_MAX = 256 * 1024 * 1024


@dataclass(slots=True)
class Unconfirmed:
    """One job on its way into the queue."""

    job_id: str
    message_id: str
    subject: str
    payload: bytes
    submitted_s: float
    resend_s: float


class Outbox:
    """Unconfirmed jobs by token, oldest first. Bounded in jobs and bytes."""

    def __init__(self, *, jobs_max: int = JOBS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._jobs_max = jobs_max
        self._bytes_max = bytes_max
        self._jobs: dict[str, Unconfirmed] = {}
        self._bytes = 0
        self._count = 0

    def add(self, *, job_id: str, message_id: str, subject: str, payload: bytes, now: float) -> str:
        """Note one job and return its token, unique for this outbox. Raises `Overloaded` when the outbox is full."""
        if len(self._jobs) >= self._jobs_max or self._bytes + len(payload) > self._bytes_max:
            raise Overloaded(
                f"{len(self._jobs)} jobs of {self._bytes} B wait for the queue to confirm them, "
                f"the limits are {self._jobs_max} and {self._bytes_max} B; retry later"
            )
        self._count += 1
        token = str(self._count)
        self._jobs[token] = Unconfirmed(job_id, message_id, subject, payload, now, now + CONFIRM_WAIT_S)
        self._bytes += len(payload)
        return token

    def settle(self, token: str) -> Unconfirmed | None:
        """Take out the job that the queue has answered, if it is still here."""
        job = self._jobs.pop(token, None)
        if job is not None:
            self._bytes -= len(job.payload)
        return job

    def give_up(self, *, now: float) -> list[Unconfirmed]:
        """Take out the jobs that have waited too long."""
        late = [token for token, job in self._jobs.items() if now - job.submitted_s >= GIVE_UP_S]
        return [job for token in late if (job := self.settle(token)) is not None]

    def resend(self, *, now: float) -> list[tuple[str, Unconfirmed]]:
        """The jobs to send once more, now: those not confirmed in time."""
        due = [(token, job) for token, job in self._jobs.items() if job.resend_s <= now]
        for _, job in due:
            job.resend_s = now + CONFIRM_WAIT_S
        return due

    def clear(self) -> None:
        """Forget all: after a loss of the connection the submitter submits again what is still wanted."""
        self._jobs.clear()
        self._bytes = 0
