"""Cancelled jobs are remembered, but not for ever."""

from appliance.workers.cancelled import Cancelled


def test_a_cancelled_job_is_known() -> None:
    cancelled = Cancelled()
    cancelled.add(["a", "b"])

    assert "a" in cancelled
    assert "c" not in cancelled


def test_the_oldest_are_forgotten() -> None:
    cancelled = Cancelled(ids_max=2)
    cancelled.add(["a", "b"])
    cancelled.add(["a", "c"])  # `a` is news again

    assert [job_id in cancelled for job_id in ("a", "b", "c")] == [True, False, True]


def test_one_message_over_the_limit_keeps_its_newest() -> None:
    cancelled = Cancelled(ids_max=2)
    cancelled.add(f"job-{number}" for number in range(1000))

    assert [f"job-{number}" in cancelled for number in (0, 997, 998, 999)] == [False, False, True, True]
