"""How many requests a key may send: a token bucket for each, which holds a minute's worth and refills evenly."""

from appliance.errors import RateLimited

MINUTE_S = 60.0


class KeyRates:
    """Of this process; the keys are numbered."""

    def __init__(self, *, keys: int, requests_per_minute: float) -> None:
        self._burst = max(1.0, requests_per_minute)
        self._per_s = requests_per_minute / MINUTE_S
        self._left = [self._burst] * max(1, keys)  # without keys all clients share one
        self._counted_s = [0.0] * max(1, keys)

    def take(self, key: int, *, now_s: float) -> None:
        """Count a request. Raises RateLimited, with the seconds until the next is taken, when none is left."""
        refilled = self._left[key] + (now_s - self._counted_s[key]) * self._per_s
        left = min(self._burst, refilled)
        self._counted_s[key] = now_s
        self._left[key] = left
        if left < 1:
            raise RateLimited(
                f"this key may send {self._burst:.0f} requests a minute; try again later",
                retry_after_s=(1 - left) / self._per_s,
            )
        self._left[key] = left - 1
