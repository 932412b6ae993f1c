"""Batches: nothing lost or computed twice, within budget, oldest first, and bulk work gets its share."""

from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.jobs import Lane
from appliance.workers.batcher import Batcher, Budget


@dataclass(eq=False)
class Piece:
    """What the batcher must know of an item."""

    tokens: int
    arrived_s: float = 0.0
    lane: Lane = "interactive"
    is_live: bool = True

    @property
    def cost_ms(self) -> float:
        return 10.0 * self.tokens


def live(piece: Piece) -> bool:
    return piece.is_live


def batcher_of(
    *pieces: Piece,
    tokens_max: int = 10,
    items_max: int = 4,
    cost_ms_max: float = 1e9,
    max_wait_s: float = 0.5,
    length_bands: tuple[int, ...] = (),
    bulk_share: float = 0.1,
) -> Batcher[Piece]:
    batcher: Batcher[Piece] = Batcher(Budget(tokens_max, items_max, cost_ms_max, max_wait_s, length_bands, bulk_share))
    for piece in pieces:
        batcher.add(piece)
    return batcher


def emptied(batcher: Batcher[Piece]) -> tuple[list[list[Piece]], list[Piece]]:
    """Every batch until none is left, and all that were found dead."""
    batches: list[list[Piece]] = []
    dead: list[Piece] = []
    while batcher.items_waiting:
        batch, found = batcher.next_batch(live)
        assert batch or found, "a batcher with items gives something"
        if batch:
            batches.append(batch)
        dead += found
    return batches, dead


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [
        ([], []),
        ([5], [1]),
        ([5, 5], [2]),
        ([5, 6], [1, 1]),
        ([10, 1], [1, 1]),
        ([11], [1]),
        ([1, 11, 1], [1, 1, 1]),
        ([1, 1, 1, 1, 1], [4, 1]),
        ([9, 9], [1, 1]),
    ],
)
def test_a_batch_stops_at_its_limits(tokens: list[int], sizes: list[int]) -> None:
    batches, _ = emptied(batcher_of(*(Piece(count) for count in tokens)))

    assert [len(batch) for batch in batches] == sizes


pieces = st.builds(
    Piece,
    tokens=st.integers(1, 14),
    arrived_s=st.floats(0, 100),
    lane=st.sampled_from(["interactive", "bulk"]),
    is_live=st.sampled_from([True, True, True, False]),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(pieces, max_size=40), st.lists(st.lists(pieces, min_size=1, max_size=5), max_size=3), st.floats(0, 1))
def test_nothing_is_lost_or_doubled(waiting: list[Piece], formed: list[list[Piece]], bulk_share: float) -> None:
    batcher = batcher_of(*waiting, bulk_share=bulk_share)
    batcher.form(formed)
    everything = [*waiting, *chain.from_iterable(formed)]
    assert batcher.items_waiting == len(everything)
    assert batcher.cost_waiting_ms == pytest.approx(sum(piece.cost_ms for piece in everything))

    batches, dead = emptied(batcher)

    came_out = [*chain.from_iterable(batches), *dead]
    assert len(came_out) == len(everything)
    assert {id(piece) for piece in came_out} == {id(piece) for piece in everything}
    assert all(piece.is_live for piece in chain.from_iterable(batches))
    assert not any(piece.is_live for piece in dead)
    assert (batcher.items_waiting, batcher.cost_waiting_ms, batcher.oldest_s) == (0, 0, float("inf"))
    assert not batcher.is_full()


@settings(deadline=None, max_examples=60)
@given(st.lists(pieces, max_size=40))
def test_a_batch_keeps_the_budget_and_the_order(waiting: list[Piece]) -> None:
    batches, _ = emptied(batcher_of(*waiting))

    for batch in batches:
        assert len(batch) <= 4
        assert len(batch) == 1 or sum(piece.tokens for piece in batch) <= 10
    for lane in ("interactive", "bulk"):
        came_out = [piece for piece in chain.from_iterable(batches) if piece.lane == lane]
        assert came_out == [piece for piece in waiting if piece.lane == lane and piece.is_live]


def test_dead_items_cost_no_budget() -> None:
    dead = [Piece(9, is_live=False) for _ in range(6)]
    alive = Piece(10)

    batch, found = batcher_of(*dead, alive).next_batch(live)

    assert batch == [alive]
    assert found == dead


def test_room_that_interactive_items_leave_goes_to_bulk_items() -> None:
    bulk, interactive = Piece(4, lane="bulk"), Piece(4)

    assert batcher_of(bulk, interactive).next_batch(live)[0] == [interactive, bulk]


@pytest.mark.parametrize(("bulk_share", "led"), [(0.0, 0), (0.1, 10), (0.25, 25), (1.0, 100)])
def test_bulk_items_lead_their_share_of_the_batches(bulk_share: float, led: int) -> None:
    lanes: list[Lane] = ["interactive", "bulk"]
    batcher = batcher_of(*(Piece(10, lane=lane) for lane in lanes for _ in range(100)), bulk_share=bulk_share)

    leaders = [batcher.next_batch(live)[0][0].lane for _ in range(100)]

    assert leaders.count("bulk") == pytest.approx(led, abs=1)


def test_bulk_items_save_up_no_share_while_none_wait() -> None:
    batcher = batcher_of(bulk_share=0.5)
    for _ in range(20):
        batcher.add(Piece(10))
        batcher.next_batch(live)
    for _ in range(3):
        batcher.add(Piece(10, lane="bulk"))
        batcher.add(Piece(10))

    leaders = [batcher.next_batch(live)[0][0].lane for _ in range(3)]

    assert leaders == ["interactive", "bulk", "interactive"]


def test_formed_batches_go_first_and_as_they_are() -> None:
    waiting, large, lone = Piece(1), [Piece(9), Piece(9)], [Piece(1)]
    batcher = batcher_of(waiting)
    batcher.form([large, lone])

    assert batcher.is_full()
    assert [batcher.next_batch(live)[0] for _ in range(3)] == [large, lone, [waiting]]


def test_a_formed_batch_that_died_makes_room_for_the_next() -> None:
    gone, waiting = [Piece(1, is_live=False)], Piece(1)
    batcher = batcher_of(waiting)
    batcher.form([gone])

    assert batcher.next_batch(live) == ([waiting], gone)


def test_an_empty_batcher_gives_nothing() -> None:
    assert batcher_of().next_batch(live) == ([], [])
    assert batcher_of().due_s() == float("inf")


@pytest.mark.parametrize(("tokens", "is_full"), [([9], False), ([10], True), ([1, 1, 1], False), ([1] * 4, True)])
def test_a_full_batch_is_known(tokens: list[int], is_full: bool) -> None:
    assert batcher_of(*(Piece(count) for count in tokens)).is_full() == is_full


def test_the_oldest_item_says_when_a_batch_is_due() -> None:
    batcher = batcher_of(Piece(1, 7.0), Piece(1, 5.0, "bulk"))
    assert (batcher.oldest_s, batcher.due_s()) == (5.0, 5.5)

    batcher.form([[Piece(1, 6.0), Piece(1, 3.0)]])
    assert (batcher.oldest_s, batcher.due_s()) == (3.0, 3.5)


def test_a_batch_stops_at_its_predicted_time() -> None:
    batches, _ = emptied(batcher_of(*(Piece(2) for _ in range(5)), tokens_max=100, items_max=100, cost_ms_max=40.0))

    assert [len(batch) for batch in batches] == [2, 2, 1]


def test_a_batch_prefers_the_band_of_its_oldest_item_and_fills_up_from_the_nearest() -> None:
    old, short, long, longest = Piece(5, 1.0), Piece(1, 2.0), Piece(6, 3.0), Piece(9, 4.0)
    batcher = batcher_of(old, short, longest, long, tokens_max=12, length_bands=(2, 6, 8))

    assert batcher.next_batch(live)[0] == [old, long, short]
    assert batcher.next_batch(live)[0] == [longest]


@pytest.mark.parametrize("length_bands", [(), (4, 8)])
def test_a_long_text_under_a_constant_stream_of_short_ones_is_served_in_its_turn(length_bands: tuple[int, ...]) -> None:
    """The stream alone would fill every batch; the long text waits for those before it and for nothing after."""
    batcher = batcher_of(*(Piece(2, number / 100) for number in range(10)), length_bands=length_bands)
    long = Piece(9, 0.1)
    batcher.add(long)
    now_s, batches = 0.1, 0
    while batcher.oldest_s <= long.arrived_s:
        for _ in range(6):
            now_s += 0.01
            batcher.add(Piece(2, now_s))
        batch, _ = batcher.next_batch(live)
        batches += 1
        if long in batch:
            break
    assert long in batch
    assert batches <= 1 + 10 // 4 + 1


def test_the_next_batchs_cost_is_its_share_of_what_waits() -> None:
    assert batcher_of().batch_cost_ms == 0.0
    assert batcher_of(Piece(3)).batch_cost_ms == pytest.approx(30.0)
    assert batcher_of(*(Piece(5) for _ in range(20))).batch_cost_ms == pytest.approx(100.0)  # ten tokens of a hundred
    assert batcher_of(*(Piece(1) for _ in range(40)), tokens_max=99).batch_cost_ms == pytest.approx(40.0)
    assert batcher_of(*(Piece(5) for _ in range(20)), cost_ms_max=60.0).batch_cost_ms == pytest.approx(60.0)
