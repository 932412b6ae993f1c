"""Unconfirmed jobs: bounded, sent again, given up."""

import pytest

from appliance.errors import Overloaded
from appliance.queue.outbox import CONFIRM_WAIT_S, GIVE_UP_S, Outbox


def add(outbox: Outbox, name: str, *, now: float = 0.0, payload: bytes = b"12345") -> str:
    """Add a job of five bytes."""
    return outbox.add(job_id=name, message_id=name, subject="s", payload=payload, now=now)


def test_a_confirmed_job_is_taken_out_once() -> None:
    outbox = Outbox()
    token = add(outbox, "a")
    settled = outbox.settle(token)
    assert settled is not None
    assert settled.job_id == "a"
    assert outbox.settle(token) is None
    assert outbox.settle("never given") is None


def test_a_job_is_sent_again_each_time_the_wait_is_over() -> None:
    outbox = Outbox()
    token = add(outbox, "a")
    assert outbox.resend(now=CONFIRM_WAIT_S - 0.1) == []
    [(again, job)] = outbox.resend(now=CONFIRM_WAIT_S)
    assert (again, job.message_id) == (token, "a")
    assert outbox.resend(now=CONFIRM_WAIT_S + 0.1) == []
    assert len(outbox.resend(now=2 * CONFIRM_WAIT_S)) == 1


def test_a_job_is_given_up_after_its_time_and_its_room_is_free_again() -> None:
    outbox = Outbox(jobs_max=2)
    add(outbox, "old")
    add(outbox, "young", now=5)
    assert [job.job_id for job in outbox.give_up(now=GIVE_UP_S)] == ["old"]
    assert outbox.give_up(now=GIVE_UP_S) == []
    add(outbox, "next", now=GIVE_UP_S)


@pytest.mark.parametrize("outbox", [Outbox(jobs_max=2), Outbox(bytes_max=14)])
def test_the_bound_refuses_at_once(outbox: Outbox) -> None:
    add(outbox, "a")
    token = add(outbox, "b")
    with pytest.raises(Overloaded, match="2 jobs of 10 B"):
        add(outbox, "c")
    outbox.settle(token)
    add(outbox, "c")


def test_clearing_frees_everything() -> None:
    outbox = Outbox(jobs_max=1, bytes_max=5)
    token = add(outbox, "a")
    outbox.clear()
    assert outbox.settle(token) is None
    assert add(outbox, "b") != token
