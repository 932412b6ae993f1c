"""What becomes of a batch that failed: the poison is found within bounds, and no neighbour is lost to it."""

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.workers.split import FaultKind, after_fault


def isolated(items: list[int], poison: set[int], fault: FaultKind) -> tuple[list[int], list[int], int]:
    """(answered, failed, runs) when every batch with a poisonous item ends in this fault."""
    answered: list[int] = []
    failed: list[int] = []
    alone: set[int] = set()
    runs = 0
    waiting = deque([items])
    while waiting:
        batch = waiting.popleft()
        runs += 1
        if not poison.intersection(batch):
            answered += batch
            continue
        parts = after_fault(batch, fault, was_alone=batch[0] in alone)
        if not parts:
            failed += batch
        if fault == "died":
            alone.update(batch)
        waiting.extend(parts)
    return answered, failed, runs


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 64), st.sets(st.integers(0, 63), max_size=5), st.sampled_from(["oom", "refused", "died"]))
def test_only_the_poison_fails(count: int, chosen: set[int], fault: FaultKind) -> None:
    items = list(range(count))
    poison = chosen.intersection(items)

    answered, failed, _ = isolated(items, poison, fault)

    assert sorted(failed) == sorted(poison)
    assert sorted(answered) == sorted(set(items) - poison)


@pytest.mark.parametrize("count", [1, 2, 3, 64, 65])
@pytest.mark.parametrize("fault", ["oom", "refused"])
def test_halving_finds_one_poison_in_a_few_runs(count: int, fault: FaultKind) -> None:
    for poison in range(count):
        _, _, runs = isolated(list(range(count)), {poison}, fault)
        assert runs <= 1 + 2 * (count - 1).bit_length()


@pytest.mark.parametrize("count", [2, 64])
def test_one_poison_kills_an_engine_twice_at_most(count: int) -> None:
    _, failed, runs = isolated(list(range(count)), {count - 1}, "died")

    assert (failed, runs) == ([count - 1], 1 + count)


def test_a_lone_item_is_given_a_second_engine() -> None:
    assert after_fault([7], "died", was_alone=False) == [[7]]
    assert after_fault([7], "died", was_alone=True) == []
    assert after_fault([7], "oom", was_alone=False) == []


@pytest.mark.parametrize("was_alone", [False, True])
@pytest.mark.parametrize("batch", [[7], [7, 8]])
def test_a_batch_that_was_never_begun_runs_again_as_it_is(batch: list[int], was_alone: bool) -> None:
    assert after_fault(batch, "lost", was_alone=was_alone) == [batch]
