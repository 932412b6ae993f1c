"""How fast the queue drains, for an honest `Retry-After`."""

import math

HALF_LIFE_S = 5.0
SECONDS_MIN = 1.0
SECONDS_MAX = 60.0


class DrainRate:
    """An exponentially decaying rate of settled jobs per second."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._last_s = 0.0

    def settled(self, now_s: float) -> None:
        """One more job is settled."""
        self._weight = self._weight_at(now_s) + 1.0
        self._last_s = now_s

    def jobs_per_s(self, now_s: float) -> float:
        """In the steady state, the rate at which jobs settle; it fades while none does."""
        return self._weight_at(now_s) * math.log(2) / HALF_LIFE_S

    def seconds_to_drain(self, jobs: int, *, now_s: float) -> float:
        """When this many jobs may be settled: 1 to 60 s; 60 when nothing is settled at all."""
        rate = self.jobs_per_s(now_s)
        if jobs <= rate * SECONDS_MIN:
            return SECONDS_MIN
        return min(jobs / rate, SECONDS_MAX) if rate > 0 else SECONDS_MAX

    def _weight_at(self, now_s: float) -> float:
        return self._weight * math.exp2(-max(0.0, now_s - self._last_s) / HALF_LIFE_S)
