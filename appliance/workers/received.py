"""How often this process has been handed a job. Pure.

A delivery that came here killed no node, since this one lives: it stood still, or was slow to say that it is at work.
"""

from collections import OrderedDict

from appliance.jobs import Job

JOBS_MAX = 16_384


class Received:
    """Counts the deliveries of the newest `JOBS_MAX` jobs."""

    def __init__(self, jobs_max: int = JOBS_MAX) -> None:
        self._jobs_max = jobs_max
        self._deliveries: OrderedDict[tuple[str, int], int] = OrderedDict()

    def add(self, job: Job) -> int:
        """Note a delivery of the job; how many came before it."""
        submission = (job.id, job.attempt_base)
        before = self._deliveries.pop(submission, 0)
        self._deliveries[submission] = before + 1
        if len(self._deliveries) > self._jobs_max:
            self._deliveries.popitem(last=False)
        return before
