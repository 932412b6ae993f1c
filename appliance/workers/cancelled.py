"""Jobs that nobody waits for any more, remembered for a while: the cancellation may come before the job does. Pure."""

from collections import OrderedDict
from collections.abc import Iterable

IDS_MAX = 65_536


class Cancelled:
    """The newest `IDS_MAX` cancelled job ids."""

    def __init__(self, ids_max: int = IDS_MAX) -> None:
        self._ids_max = ids_max
        self._ids: OrderedDict[str, None] = OrderedDict()

    def add(self, job_ids: Iterable[str]) -> None:
        """Remember these, and forget the oldest over the limit."""
        for job_id in job_ids:
            self._ids[job_id] = None
            self._ids.move_to_end(job_id)
        while len(self._ids) > self._ids_max:
            self._ids.popitem(last=False)

    def __contains__(self, job_id: str) -> bool:
        return job_id in self._ids
