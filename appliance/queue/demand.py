"""How many jobs one pull has asked for, as a pure state machine. Jobs are counted; time is passed in, in seconds."""

# A node that stands still goes on being handed jobs until its requests expire. Below the ack wait, each job is handed
# to it once at most before another node gets it.
EXPIRES_S = 4.0  # how long the server keeps one pull request
HEARTBEAT_S = 1.5  # how often the server shows that it still keeps it, when there is nothing to deliver
SILENCE_MAX_S = 2.5 * HEARTBEAT_S  # after that the server has lost it


class Demand:
    """A standing wish for jobs, and the part of it that the server knows of.

    `ask` is stingy: it tops up only when half of the wish or less is outstanding, so a node that raises its wish by one
    after each job sends a few large requests instead of many small ones. While there is a wish, something is always
    outstanding, so no job waits for the rest.
    """

    def __init__(self, *, now: float) -> None:
        self._wish = 0
        self._outstanding = 0
        self._heard_s = now

    def want(self, jobs: int) -> None:
        """Set the number of deliveries still wished for, those outstanding included."""
        self._wish = max(0, jobs)

    def ask(self, *, now: float) -> int:
        """How many jobs to request now, at most; 0 is no request. The answer counts as asked for."""
        if self._wish == 0 or self._outstanding * 2 > self._wish:
            return 0
        if self._outstanding == 0:
            self._heard_s = now  # the silence is measured from the first request on
        batch = self._wish - self._outstanding
        self._outstanding = self._wish
        return batch

    def delivered(self, *, now: float) -> None:
        """One job arrived, perhaps one more than wished for."""
        self._heard_s = now
        self._wish = max(0, self._wish - 1)
        self._outstanding = max(0, self._outstanding - 1)

    def heartbeat(self, *, now: float) -> None:
        """The server still keeps our requests."""
        self._heard_s = now

    def ended(self, unserved: int, *, now: float) -> None:
        """A request expired with `unserved` of its jobs not delivered."""
        self._heard_s = now
        self._outstanding = max(0, self._outstanding - unserved)

    def lost(self) -> None:
        """The server knows of no request any more; the wish stays."""
        self._outstanding = 0

    def is_silent(self, *, now: float) -> bool:
        """The server should have been heard by now."""
        return self._outstanding > 0 and now - self._heard_s > SILENCE_MAX_S
