"""What a node remembers of the deliveries that it has had."""

from appliance.workers.received import Received
from tests.node_parts import job_of


def test_deliveries_of_one_submission_are_counted() -> None:
    received = Received()

    assert [received.add(job_of(name)) for name in ("a", "b", "a", "a", "b")] == [0, 0, 1, 2, 1]


def test_the_oldest_are_forgotten() -> None:
    received = Received(jobs_max=2)

    assert [received.add(job_of(name)) for name in ("a", "b", "a", "c", "a", "b")] == [0, 0, 1, 0, 2, 0]
