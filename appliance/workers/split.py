"""What becomes of a batch that an engine could not run: isolate the poison, save its neighbours. Pure.

- Out of memory, or refused: halve it. The fault is found in log2(n) runs and every other item is answered.
- The engine died on it: each death costs a restart, so every item then runs alone, and one that kills it alone is the
  poison.
- Lost, since the engine died before it turned to this batch: run it again as it is, whatever it was.
"""

from collections.abc import Sequence
from typing import Literal, TypeVar

T = TypeVar("T")

FaultKind = Literal["oom", "refused", "died", "lost"]


def after_fault(batch: Sequence[T], fault: FaultKind, *, was_alone: bool) -> list[list[T]]:
    """The batches to run instead; empty when the one item left is at fault itself.

    `was_alone` says that this batch already is a retry of an item on its own.
    """
    if fault == "lost":
        return [list(batch)]
    if len(batch) > 1:
        if fault == "died":
            return [[item] for item in batch]
        middle = len(batch) // 2
        return [list(batch[:middle]), list(batch[middle:])]
    # A lone item that saw the engine die is tried once more: something else may have killed it.
    return [list(batch)] if fault == "died" and not was_alone else []
