"""Rotary positions (RoPE, Su et al. 2021, in the half-split form of GPT-NeoX): queries and keys turned by position."""

import math
from typing import NamedTuple

import torch
from torch.nn import functional

from appliance.workers.engines.packed.config import Stretch


class Angles(NamedTuple):
    """Cosine and signed sine for each row of a batch: [rows, 1, head_dim]."""

    cosine: torch.Tensor
    sine: torch.Tensor


class Rotary:
    """The angles of every position, computed once in float32."""

    def __init__(
        self,
        *,
        head_dim: int,
        theta: float,
        positions_max: int,
        dtype: torch.dtype,
        device: str,
        stretch: Stretch | None = None,
    ) -> None:
        frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        if stretch is not None:
            frequencies = _stretched(frequencies, stretch)
        turns = torch.arange(positions_max, dtype=torch.float32)[:, None] * frequencies
        self._cosine = torch.cat((turns.cos(), turns.cos()), dim=1).to(device, dtype)
        # The lower half gets -sin: with the halves swapped, one product and one sum turn the whole head.
        self._sine = torch.cat((-turns.sin(), turns.sin()), dim=1).to(device, dtype)

    def angles(self, positions: torch.Tensor) -> Angles:
        return Angles(
            functional.embedding(positions, self._cosine).unsqueeze(1),
            functional.embedding(positions, self._sine).unsqueeze(1),
        )


def _stretched(frequencies: torch.Tensor, stretch: Stretch) -> torch.Tensor:
    """Fast rotations stay, slow ones are divided by the factor, and those between are blended (Llama 3.1)."""
    turns = stretch.original_max_position_embeddings * frequencies / (2 * math.pi)  # within the trained length
    low, high = stretch.low_freq_factor, stretch.high_freq_factor
    share = ((turns - low) / (high - low)).clamp(0, 1)  # of the plain frequency
    return frequencies * (share + (1 - share) / stretch.factor)


def turned(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """`x` of [rows, heads, head_dim] with every head turned by its row's angle."""
    return torch.addcmul(x * angles.cosine, x.roll(x.shape[-1] // 2, dims=-1), angles.sine)
