"""How fast the queue drains, for an honest `Retry-After`."""

import math

HALF_LIFE_S = 5.0
SECONDS_MIN = 1.0
SECONDS_MAX = 60.0


class DrainRate:
    """An exponentially decaying rate of settled jobs per second."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._last_s: float | None = None

    def settled(self, now_s: float) -> None:
        """One more job is settled."""
        if self._last_s is not None:
            self._weight *= math.exp2(-(now_s - self._last_s) / HALF_LIFE_S)
        self._last_s = now_s
        self._weight += 1.0

    @property
    def jobs_per_s(self) -> float:
        """In the steady state, the rate at which jobs settle."""
        return self._weight * math.log(2) / HALF_LIFE_S

    def seconds_to_drain(self, jobs: int) -> float:
        """When this many jobs may be settled: 1 to 60 s; 60 when nothing is settled at all."""
        if self.jobs_per_s <= 0:
            return SECONDS_MIN if jobs == 0 else SECONDS_MAX
        return min(max(jobs / self.jobs_per_s, SECONDS_MIN), SECONDS_MAX)
