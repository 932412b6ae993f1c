"""Which keys each query sees, planned once per batch and shared by all layers of a kind.

A plan is a list of parts, each one call of an attention kernel: some query rows against some key rows. The parts'
query rows follow each other without gaps and cover the pack.

On a CPU the kernel for 127 keys takes twice the time of the one for 128, so keys are read in whole multiples of 16: the
rows that follow a text, which belong to the next one or are spare, come along and are masked out. The queries of the
last part run on over the spare rows; their results are dropped with the spare rows.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from appliance.workers.engines.packed.pack import Pack, Segment, rounded_up

CPU_KEYS_MULTIPLE = 16
_WINDOW_QUERIES = 256  # queries of one part under a window: enough for the kernel, few enough to skip most keys


class Part(NamedTuple):
    """Queries from where the last part ended, against keys from `key_start`."""

    queries: int
    key_start: int
    keys: int
    mask: torch.Tensor | None  # added to the scores: [1, 1 or heads, 1 or queries, keys]


class FullMasks:
    """Every token of a text sees every token of it."""

    def __init__(self, *, positions_max: int, dtype: torch.dtype, device: str, keys_multiple: int) -> None:
        self._multiple = keys_multiple
        self._zeros = rounded_up(positions_max, keys_multiple)
        # A window on this row, placed by length, is any text's mask.
        self._row = torch.zeros(1, 1, 1, self._zeros + keys_multiple, dtype=dtype, device=device)
        self._row[..., self._zeros :] = -torch.inf

    def plan(self, pack: Pack) -> list[Part]:
        return [
            Part(queries, start, keys, None if keys == length else self._mask(length, keys))
            for (start, length), queries, keys in _spans(pack, self._multiple)
        ]

    def _mask(self, length: int, keys: int) -> torch.Tensor:
        return self._row.narrow(3, self._zeros - length, keys)


class CausalMasks:
    """A token sees itself and what stands before it; the kernel's own causal rule hides the surplus keys as well."""

    def __init__(self, *, keys_multiple: int) -> None:
        self._multiple = keys_multiple

    def plan(self, pack: Pack) -> list[Part]:
        return [Part(queries, start, keys, None) for (start, _), queries, keys in _spans(pack, self._multiple)]


class BiasMasks:
    """Every token sees every token of its text, with a learned bias by distance and head (MPNet, T5)."""

    def __init__(self, by_distance: torch.Tensor, *, keys_multiple: int) -> None:
        """`by_distance[head, d + middle]` is the bias of a key that stands d after its query; middle is its half."""
        self._by_distance = by_distance
        self._multiple = keys_multiple

    def plan(self, pack: Pack) -> list[Part]:
        made: dict[tuple[int, int, int], torch.Tensor] = {}
        parts = []
        for (start, length), queries, keys in _spans(pack, self._multiple):
            shape = (length, queries, keys)
            if shape not in made:
                made[shape] = band(self._by_distance, queries=queries, keys=keys, query_offset=0)
                made[shape][..., length:] = -torch.inf
            parts.append(Part(queries, start, keys, made[shape]))
        return parts


class WindowMasks:
    """A token sees the tokens of its text that stand at most `window` away (ModernBERT's local layers)."""

    def __init__(self, *, window: int, dtype: torch.dtype, device: str, keys_multiple: int) -> None:
        self._window = window
        self._multiple = keys_multiple
        distances = torch.arange(-window - 1, window + 2, device=device)
        seen = torch.zeros(1, len(distances), dtype=dtype, device=device)
        self._by_distance = seen.masked_fill(distances.abs() > window, -torch.inf)

    def plan(self, pack: Pack) -> list[Part]:
        return [part for segment, queries in _queries(pack) for part in self._parts(segment, queries)]

    def _parts(self, segment: Segment, queries: int) -> list[Part]:
        start, length = segment
        parts = []
        for first in range(0, length, _WINDOW_QUERIES):
            is_last = first + _WINDOW_QUERIES >= length
            count = (queries if is_last else first + _WINDOW_QUERIES) - first
            key_first = max(0, first - self._window)
            key_end = min(length, first + count + self._window)
            keys = rounded_up(key_end - key_first, self._multiple)
            if start + key_first + keys > start + rounded_up(length, self._multiple):
                key_first = rounded_up(length, self._multiple) - keys  # still within what the pack holds
            mask = band(self._by_distance, queries=count, keys=keys, query_offset=first - key_first)
            mask[..., length - key_first :] = -torch.inf
            # A spare query must see something: the softmax of nothing is not a number, and would spread.
            own = min(count, length - first)
            mask[..., own:, :] = mask[..., own - 1 : own, :]
            parts.append(Part(count, start + key_first, keys, mask))
        return parts


def band(by_distance: torch.Tensor, *, queries: int, keys: int, query_offset: int) -> torch.Tensor:
    """[1, heads, queries, keys] of `by_distance[:, middle + (key - query)]`, query 0 standing at key `query_offset`.

    Distances beyond the table take its outermost value.
    """
    middle = by_distance.shape[1] // 2
    steps = torch.arange(keys, device=by_distance.device) - torch.arange(queries, device=by_distance.device)[:, None]
    index = (steps - query_offset + middle).clamp_(0, by_distance.shape[1] - 1)
    return by_distance[:, index].unsqueeze(0)


def _queries(pack: Pack) -> Sequence[tuple[Segment, int]]:
    """Each text with the query rows of its part: its own, and for the last text the spare rows too."""
    last = len(pack.segments) - 1
    return [
        (segment, pack.rows - segment.start if number == last else segment.length)
        for number, segment in enumerate(pack.segments)
    ]


def _spans(pack: Pack, multiple: int) -> Sequence[tuple[Segment, int, int]]:
    return [(segment, queries, rounded_up(segment.length, multiple)) for segment, queries in _queries(pack)]
