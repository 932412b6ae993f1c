"""How many jobs a node wishes for: as much work as it can start soon."""

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.workers.backlog import WISH_MAX, Backlog


def take(backlog: Backlog, job_ms: float) -> None:
    """A job is read and taken on."""
    backlog.measured(job_ms)
    backlog.opened(job_ms)


def test_the_first_job_is_wished_for_alone() -> None:
    backlog = Backlog(limit_ms=lambda: 100)

    assert backlog.wish(unread_jobs=0) == 1
    assert backlog.wish(unread_jobs=1) == 0


def test_room_is_counted_in_jobs_of_the_usual_size() -> None:
    backlog = Backlog(limit_ms=lambda: 100)
    take(backlog, 10)
    assert backlog.wish(unread_jobs=0) == 9
    assert backlog.wish(unread_jobs=4) == 5

    backlog.closed(10)
    assert backlog.wish(unread_jobs=0) == 10


def test_a_full_backlog_wishes_for_nothing() -> None:
    backlog = Backlog(limit_ms=lambda: 100)
    take(backlog, 100)
    assert backlog.wish(unread_jobs=0) == 0

    backlog.closed(1)
    assert backlog.wish(unread_jobs=0) == 1
    assert backlog.wish(unread_jobs=1) == 0


def test_a_job_over_the_whole_backlog_is_served_still() -> None:
    backlog = Backlog(limit_ms=lambda: 100)
    take(backlog, 5000)
    backlog.closed(5000)

    assert backlog.wish(unread_jobs=0) == 1


def test_a_wish_is_bounded() -> None:
    backlog = Backlog(limit_ms=lambda: 1e9)
    take(backlog, 1)

    assert backlog.wish(unread_jobs=0) == WISH_MAX


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 500), min_size=1, max_size=50), st.integers(0, 50))
def test_a_wish_fits_the_room_and_never_starves(sizes: list[int], unopened: int) -> None:
    backlog = Backlog(limit_ms=lambda: 1000)
    for size in sizes:
        take(backlog, size)
    wish = backlog.wish(unread_jobs=unopened)
    room = 1000 - sum(sizes) - unopened * min(sizes)
    assert 0 <= wish <= max(1, room / min(sizes))

    for size in sizes:
        backlog.closed(size)
    assert backlog.wish(unread_jobs=0) >= 1


def test_a_backlog_is_overfull_at_twice_its_limit() -> None:
    backlog = Backlog(limit_ms=lambda: 100)
    take(backlog, 200)
    assert not backlog.is_overfull

    take(backlog, 1)
    assert backlog.is_overfull

    backlog.closed(1)
    assert not backlog.is_overfull
