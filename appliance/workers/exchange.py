"""Which of a machine's devices takes a waiting batch: the one that is predicted to finish it sooner. Pure.

All devices of a node take from one local queue. A device that is free takes what waits, unless the others would have
finished everything that waits before it finished this batch: a slow device beside a fast one helps under load and
keeps out of the way without. Times are monotonic seconds.
"""

from dataclasses import dataclass, field

SMOOTHING = 0.1  # weight of the newest batch in a device's slowness
SLOWNESS_MIN, SLOWNESS_MAX = 0.05, 100.0  # one outlier must not exclude a device


@dataclass(slots=True)
class _Place:
    slowness: float = 1.0  # measured ÷ predicted
    running_s: list[float] = field(default_factory=list)  # predicted times of the batches it has, in order
    since_s: float = 0.0  # when the first of them began


class Exchange:
    """What each device has in hand, and how fast it has been."""

    def __init__(self) -> None:
        self._places: dict[str, _Place] = {}
        self._slowness: dict[str, float] = {}

    def join(self, name: str) -> None:
        """The device can take batches."""
        self._places[name] = _Place(self._slowness.get(name, 1.0))

    def leave(self, name: str) -> None:
        """The device is down; what it had is lost."""
        if (place := self._places.pop(name, None)) is not None:
            self._slowness[name] = place.slowness

    def sent(self, name: str, batch_s: float, *, now_s: float) -> None:
        """The device was handed a batch that is predicted to take `batch_s` on a device of slowness 1."""
        place = self._places[name]
        if not place.running_s:
            place.since_s = now_s
        place.running_s.append(batch_s)

    def done(self, name: str, *, now_s: float, measured_s: float | None = None) -> None:
        """Its oldest batch came back, having taken `measured_s` of the device; None if it failed."""
        place = self._places.get(name)
        if place is None or not place.running_s:
            return
        predicted_s = place.running_s.pop(0)
        place.since_s = now_s
        if measured_s is not None and predicted_s > 0:
            newest = min(max(measured_s / predicted_s, SLOWNESS_MIN), SLOWNESS_MAX)
            place.slowness += SMOOTHING * (newest - place.slowness)

    def free_s(self, name: str) -> float:
        """When the device is predicted to be free: the past, when it is idle."""
        place = self._places[name]
        return place.since_s + place.slowness * sum(place.running_s)

    def takes(self, name: str, *, batch_s: float, waiting_s: float, now_s: float) -> bool:
        """Whether the device should take a batch of `batch_s`, of `waiting_s` of work that waits in all."""
        others = [other for other in self._places if other != name]
        if not others:
            return True
        speed = sum(1 / self._places[other].slowness for other in others)
        in_hand_s = sum(self._remaining_s(other, now_s) / self._places[other].slowness for other in others)
        # A batch is not divisible: however many the others are, one of them has to run it.
        soonest_s = min(self._remaining_s(other, now_s) + self._places[other].slowness * batch_s for other in others)
        others_finish_s = max((in_hand_s + waiting_s) / speed, soonest_s)
        return self._remaining_s(name, now_s) + self._places[name].slowness * batch_s <= others_finish_s

    def _remaining_s(self, name: str, now_s: float) -> float:
        return max(0.0, self.free_s(name) - now_s) if self._places[name].running_s else 0.0
