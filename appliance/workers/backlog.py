"""How many jobs to wish for: as much predicted work as the node can start soon, and no more. Pure.

A message's work is known only once it is here, so the wish is counted in jobs and sized by the work of recent ones.
"""

from collections.abc import Callable

SMOOTHING = 0.1  # weight of the newest job in the running mean of work a job
WISH_MAX = 256  # jobs; one pull request's worth of short texts
OVERFULL = 2.0  # times the limit: then what comes is given back, for a node that can start it sooner


class Backlog:
    """The work of one model, in predicted milliseconds, that is on this node and not computed yet."""

    def __init__(self, *, limit_ms: Callable[[], float]) -> None:
        """`limit_ms` tells how much work to have at hand, by what batches take at present."""
        self._limit_ms = limit_ms
        self._work_ms = 0.0
        self._job_ms = 0.0  # of a recent job, on average

    @property
    def is_overfull(self) -> bool:
        """More was pulled than can be started soon: recent jobs were larger than those before them."""
        return self._work_ms > OVERFULL * self._limit_ms()

    def measured(self, job_ms: float) -> None:
        """A delivered job turned out to be this much work."""
        if self._job_ms == 0.0:
            self._job_ms = job_ms
        self._job_ms += SMOOTHING * (job_ms - self._job_ms)

    def opened(self, work_ms: float) -> None:
        """This node takes on so much work."""
        self._work_ms += work_ms

    def closed(self, work_ms: float) -> None:
        """So much work is computed, or not wanted any more."""
        self._work_ms -= work_ms

    def wish(self, *, unread_jobs: int) -> int:
        """Jobs to wish for. `unread_jobs` are delivered but not tokenized: their work is estimated.

        One at least while there is room, since a single job may be any amount of work; none when there is no room.
        """
        if self._job_ms == 0.0:
            return 1 if unread_jobs == 0 else 0  # nothing is known yet: the first job will tell
        room_ms = self._limit_ms() - self._work_ms - unread_jobs * self._job_ms
        if room_ms <= 0:
            return 0
        return max(1, min(WISH_MAX, int(room_ms / self._job_ms)))
