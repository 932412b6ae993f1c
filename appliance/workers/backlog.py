"""How many jobs to wish for: as much work as the node can start soon, and no more. Pure.

A message's work is known only once it is here, so the wish is counted in jobs and sized by the work of recent ones.
"""

SMOOTHING = 0.1  # weight of the newest job in the running mean of tokens a job
WISH_MAX = 256  # jobs; one pull request's worth of short texts


class Backlog:
    """The work of one model that is on this node and not computed yet."""

    def __init__(self, *, tokens_max: float) -> None:
        self._tokens_max = tokens_max
        self._tokens = 0
        self._tokens_a_job = 0.0

    def opened(self, tokens: int) -> None:
        """A delivered job turned out to be this much work."""
        self._tokens += tokens
        if self._tokens_a_job == 0.0:
            self._tokens_a_job = float(tokens)
        self._tokens_a_job += SMOOTHING * (tokens - self._tokens_a_job)

    def closed(self, tokens: int) -> None:
        """A job was settled."""
        self._tokens -= tokens

    def wish(self, *, unopened_jobs: int) -> int:
        """Jobs to wish for. `unopened_jobs` are delivered but not tokenized: their work is estimated.

        One at least while there is room, since a single job may be any amount of work; none when there is no room.
        """
        if self._tokens_a_job == 0.0:
            return 1 if unopened_jobs == 0 else 0  # nothing is known yet: the first job will tell
        room_tokens = self._tokens_max - self._tokens - unopened_jobs * self._tokens_a_job
        if room_tokens <= 0:
            return 0
        return max(1, min(WISH_MAX, int(room_tokens / self._tokens_a_job)))
