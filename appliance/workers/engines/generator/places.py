"""Which place in the cache a sequence gets, and what of its prompt lies there, or in another place, already. Pure.

Prompts are computed in chunks on a fixed grid, so that a chunk's keys and values are the same numbers whenever they are
computed and whatever runs beside them. Only whole chunks of prompts are used again: what was written token by token has
other rounding, and a text must not depend on who asked before.
"""

from collections import OrderedDict
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

CHUNK_TOKENS: Final = 64

Ids = npt.NDArray[np.int32]
_NOTHING: Final = np.empty(0, dtype=np.int32)


class Taken(NamedTuple):
    """A place for a sequence. The first `known` tokens of its prompt are in `source`, which may be the place itself."""

    place: int
    source: int
    known: int


class Places:
    """So many places, and the prompts' chunks that lie in each, used or free."""

    def __init__(self, count: int) -> None:
        self._kept: list[Ids] = [_NOTHING] * count
        self._free = OrderedDict.fromkeys(range(count))  # the longest unused first

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def take(self, prompt: Ids) -> Taken:
        """The best place for a prompt of one token at least; one must be free.

        Its last token is never known: somebody has to compute what follows it.
        """
        shared = [_shared(kept, prompt) for kept in self._kept]
        source = max(range(len(shared)), key=shared.__getitem__)
        known = shared[source]
        place = source if source in self._free and known else self._least_missed()
        del self._free[place]
        self._kept[place] = prompt[:known]
        return Taken(place, source, known)

    def keep(self, place: int, prompt: Ids, computed: int) -> None:
        """The first `computed` tokens of the prompt lie in the place now."""
        self._kept[place] = prompt[: computed // CHUNK_TOKENS * CHUNK_TOKENS]

    def free(self, place: int) -> None:
        """Its sequence is over; what lies there stays until another needs the place."""
        self._free[place] = None

    def _least_missed(self) -> int:
        """An empty place, or the one that was free for the longest."""
        return next((place for place in self._free if not self._kept[place].size), next(iter(self._free)))


def chunk_end(start: int, length: int) -> int:
    """Where the chunk ends that begins at `start`, of a prompt of `length` tokens."""
    return min(length, (start // CHUNK_TOKENS + 1) * CHUNK_TOKENS)


def _shared(kept: Ids, prompt: Ids) -> int:
    """Tokens of whole chunks that both begin with."""
    count = min(len(kept), len(prompt) - 1)
    differing = np.flatnonzero(kept[:count] != prompt[:count])
    same = int(differing[0]) if differing.size else count
    return same // CHUNK_TOKENS * CHUNK_TOKENS
