"""The keys and values of the tokens that sequences have behind them, and how the rows of a pass attend to them.

One place a sequence, of a fixed capacity. On a CPU memory that was never written to is not taken, so a place costs
what its longest sequence so far has cost.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch.nn import functional

from appliance.workers.engines.packed.rotary import Angles

# Keys that are looked at: with these multiples torch's kernel rounds a row alike whatever its neighbours have.
_KEYS_MULTIPLE: Final = 512
_KEYS_MULTIPLE_16: Final = 64  # in 16 bits
_ALIGNMENT: Final = 64  # of torch's own tensors, bytes
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
            # Zeros, since what is masked is multiplied too, and chance bits may be no number.
            LayerCache(_zeros(shape, dtype, device), _zeros(shape, dtype, device))
            for _ in range(layers)
        ]
        self._keys_multiple = _KEYS_MULTIPLE if dtype == torch.float32 else _KEYS_MULTIPLE_16

    @torch.inference_mode()
    def copy(self, source: int, target: int, *, tokens: int) -> None:
        """The first tokens of one place are those of another, too."""
        start, end = source * self.capacity, target * self.capacity
        for layer in self.layers:
            for tensor in layer:
                tensor[end : end + tokens] = tensor[start : start + tokens]

    def plan(self, runs: Sequence[Run], *, rows: int) -> "Plan":
        """For a pass of so many rows, those of `runs` first, in order, and the others spare.

        All runs are single tokens, or there is one.
        """
        where = np.full(rows, self.layers[0].keys.shape[0] - 1, dtype=np.int64)
        for run in runs:
            first = run.place * self.capacity + run.start
            where[run.row : run.row + run.rows] = np.arange(first, first + run.rows)
        look: _Looks = self._steps(runs) if runs[0].rows == 1 else self._prompt(runs[0])
        return Plan(torch.from_numpy(where).to(self._device), look)

    def _prompt(self, run: Run) -> "_Prompt":
        seen = run.start + run.rows
        mask = torch.ones(run.rows, seen, dtype=torch.bool, device=self._device).tril(run.start)
        return _Prompt(run.rows, run.place * self.capacity, seen, mask)

    def _steps(self, runs: Sequence[Run]) -> "_Steps":
        """One look for all: from the first place that is in use to the last, at as many keys as the longest has.

        That number is a multiple at which a row's rounding is the same however long the others are.
        """
        first = min(run.place for run in runs)
        places = max(run.place for run in runs) + 1 - first
        longest = max(run.start for run in runs) + 1
        keys = min(self.capacity, -(-longest // self._keys_multiple) * self._keys_multiple)
        mask = np.full((places, 1, 1, keys), -np.inf, dtype=np.float32)
        mask[..., 0] = 0.0  # a place that is not in use looks at something
        for run in runs:
            mask[run.place - first, ..., : run.start + 1] = 0.0
        own = np.array([run.place - first for run in runs], dtype=np.int64)
        dtype = self.layers[0].keys.dtype
        return _Steps(
            first * self.capacity,
            places,
            self.capacity,
            keys,
            torch.from_numpy(own).to(self._device),
            torch.from_numpy(mask).to(self._device, dtype),
        )


class _Prompt(NamedTuple):
    """What the rows of one sequence look at: a slice of the cache, each up to itself."""

    rows: int
    first: int  # row of the cache
    seen: int  # rows of it
    mask: torch.Tensor  # [rows, seen]

    def attend(self, q: torch.Tensor, layer: LayerCache) -> torch.Tensor:
        """[rows, heads, head_dim]"""
        heads, head_dim = q.shape[1:]
        key_heads = layer.keys.shape[1]
        groups = heads // key_heads
        # Queries that share a key head are rows of one head: [1, key heads, groups * rows, head_dim].
        queries = q[: self.rows].view(self.rows, key_heads, groups, head_dim).permute(1, 2, 0, 3)
        found = functional.scaled_dot_product_attention(
            queries.reshape(1, key_heads, groups * self.rows, head_dim),
            layer.keys[self.first : self.first + self.seen].transpose(0, 1).unsqueeze(0),
            layer.values[self.first : self.first + self.seen].transpose(0, 1).unsqueeze(0),
            attn_mask=self.mask.repeat(groups, 1),
        )
        found = found.view(key_heads, groups, self.rows, head_dim).permute(2, 0, 1, 3)
        return found.reshape(self.rows, heads, head_dim)


class _Steps(NamedTuple):
    """What the newest tokens of several sequences look at: neighbouring places, each up to its own length."""

    first: int  # row of the cache
    places: int
    capacity: int
    keys: int
    own: torch.Tensor  # int64 [rows]: the place of each row, from the first on
    mask: torch.Tensor  # [places, 1, 1, keys], added to the scores

    def attend(self, q: torch.Tensor, layer: LayerCache) -> torch.Tensor:
        """[rows, heads, head_dim]"""
        heads, head_dim = q.shape[1:]
        key_heads = layer.keys.shape[1]
        rows = self.own.shape[0]
        queries = q.new_zeros(self.places, heads, head_dim)
        queries[self.own] = q[:rows]
        found = functional.scaled_dot_product_attention(
            queries.view(self.places, key_heads, heads // key_heads, head_dim),
            self._of(layer.keys),
            self._of(layer.values),
            attn_mask=self.mask,
        )
        return found.reshape(self.places, heads, head_dim)[self.own]

    def _of(self, cache: torch.Tensor) -> torch.Tensor:
        """[places, key heads, keys, head_dim], where the cache lies."""
        end = self.first + self.places * self.capacity
        return (
            cache[self.first : end].view(self.places, self.capacity, *cache.shape[1:])[:, : self.keys].transpose(1, 2)
        )


_Looks = _Prompt | _Steps


class Plan(NamedTuple):
    """Of one pass, for all layers."""

    where: torch.Tensor  # int64 [rows]: the cache's row of each
    look: _Looks


class Cached:
    """`stack.Seen`: each row sees its sequence up to itself."""

    __slots__ = ("_layer", "_plan", "angles")

    def __init__(self, layer: LayerCache, plan: Plan, angles: Angles | None) -> None:
        self.angles = angles
        self._layer = layer
        self._plan = plan

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """See `stack.Seen`. Keys and values are kept first."""
        self._layer.keys.index_copy_(0, self._plan.where, k)
        self._layer.values.index_copy_(0, self._plan.where, v)
        found = self._plan.look.attend(q, self._layer)
        if found.shape[0] == q.shape[0]:
            return found.reshape(q.shape[0], -1)
        answer = q.new_zeros(q.shape[0], found.shape[1] * found.shape[2])  # spare rows: of nobody, and finite
        answer[: found.shape[0]] = found.flatten(1)
        return answer


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    """As torch.zeros, which writes them: on a CPU these are the system's, and take no memory until they are used."""
    if device != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    raw = np.zeros(size + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + size]).view(dtype).view(*shape)
