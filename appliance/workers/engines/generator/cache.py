"""The keys and values of the tokens that sequences have behind them, and how the rows of a pass attend to them.

One place a sequence, of a fixed capacity. On a CPU memory that was never written to is not taken, so a place costs
what its longest sequence so far has cost.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from appliance.workers.engines.packed.rotary import Angles

_SPARE_ROWS: Final = 1  # behind the places: where rows that belong to no sequence write


class Run(NamedTuple):
    """Consecutive tokens of one sequence in a pass."""

    row: int  # of the first
    rows: int
    place: int
    start: int  # how many tokens of the sequence are in the cache already


class LayerCache(NamedTuple):
    """Of one layer: [places * capacity + 1, key heads, head_dim] each."""

    keys: torch.Tensor
    values: torch.Tensor


class Cache:
    """The places of one model."""

    def __init__(
        self,
        *,
        layers: int,
        places: int,
        capacity: int,
        key_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self.capacity = capacity
        self._device = device
        shape = (places * capacity + _SPARE_ROWS, key_heads, head_dim)
        self.layers = [
            LayerCache(torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device))
            for _ in range(layers)
        ]

    @torch.inference_mode()
    def copy(self, source: int, target: int, *, tokens: int) -> None:
        """The first tokens of one place are those of another, too."""
        start, end = source * self.capacity, target * self.capacity
        for layer in self.layers:
            for tensor in layer:
                tensor[end : end + tokens] = tensor[start : start + tokens]

    def plan(self, runs: Sequence[Run], *, rows: int) -> "Plan":
        """For a pass of so many rows, those of `runs` first, in order, and the others spare."""
        where = np.full(rows, self.layers[0].keys.shape[0] - 1, dtype=np.int64)
        for run in runs:
            first = run.place * self.capacity + run.start
            where[run.row : run.row + run.rows] = np.arange(first, first + run.rows)
        return Plan(
            torch.from_numpy(where).to(self._device),
            [_Look.of(run, self.capacity, self._device) for run in runs],
        )


class _Look(NamedTuple):
    """What one run attends to: a slice of the cache, and which of it each of its rows may see."""

    row: int
    rows: int
    first: int  # row of the cache
    seen: int  # rows of it
    mask: torch.Tensor | None  # [rows, seen]; None: all of it

    @classmethod
    def of(cls, run: Run, capacity: int, device: str) -> "_Look":
        seen = run.start + run.rows
        mask = None
        if run.rows > 1:
            places = torch.arange(seen, device=device)
            mask = places <= torch.arange(run.start, seen, device=device)[:, None]
        return cls(run.row, run.rows, run.place * capacity, seen, mask)


class Plan(NamedTuple):
    """Of one pass, for all layers."""

    where: torch.Tensor  # int64 [rows]: the cache's row of each
    looks: Sequence[_Look]


class Cached:
    """`stack.Seen`: each row sees its sequence up to itself."""

    __slots__ = ("_layer", "_plan", "angles")

    def __init__(self, layer: LayerCache, plan: Plan, angles: Angles | None) -> None:
        self.angles = angles
        self._layer = layer
        self._plan = plan

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `stack.Seen`. Keys and values are kept first."""
        keys, values = self._layer
        keys.index_copy_(0, self._plan.where, k)
        values.index_copy_(0, self._plan.where, v)
        rows, heads, head_dim = q.shape
        groups = heads // keys.shape[1]
        answer = torch.zeros_like(q)
        for look in self._plan.looks:
            # Queries that share a key head are rows of one head: [key heads, groups * rows, head_dim].
            own = q[look.row : look.row + look.rows]
            queries = (
                own.view(look.rows, -1, groups, head_dim)
                .permute(1, 2, 0, 3)
                .reshape(1, -1, groups * look.rows, head_dim)
            )
            mask = None if look.mask is None else look.mask.repeat(groups, 1)
            found = functional.scaled_dot_product_attention(
                queries,
                keys[look.first : look.first + look.seen].transpose(0, 1).unsqueeze(0),
                values[look.first : look.first + look.seen].transpose(0, 1).unsqueeze(0),
                attn_mask=mask,
            )
            found = found.view(-1, groups, look.rows, head_dim).permute(2, 0, 1, 3).reshape(look.rows, heads, head_dim)
            answer[look.row : look.row + look.rows] = found
        return answer.view(rows, -1)
