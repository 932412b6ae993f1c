"""Rotary positions (RoPE, Su et al. 2021, in the half-split form of GPT-NeoX): queries and keys turned by position."""

from typing import NamedTuple

import torch
from torch.nn import functional


class Angles(NamedTuple):
    """Cosine and signed sine for each row of a batch: [rows, 1, head_dim]."""

    cosine: torch.Tensor
    sine: torch.Tensor


class Rotary:
    """The angles of every position, computed once in float32."""

    def __init__(self, *, head_dim: int, theta: float, positions_max: int, dtype: torch.dtype, device: str) -> None:
        frequencies = 1.0 / (theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim))
        turns = torch.arange(positions_max, dtype=torch.float32)[:, None] * frequencies
        self._cosine = torch.cat((turns.cos(), turns.cos()), dim=1).to(device, dtype)
        # The lower half gets -sin: with the halves swapped, one product and one sum turn the whole head.
        self._sine = torch.cat((-turns.sin(), turns.sin()), dim=1).to(device, dtype)

    def angles(self, positions: torch.Tensor) -> Angles:
        return Angles(
            functional.embedding(positions, self._cosine).unsqueeze(1),
            functional.embedding(positions, self._sine).unsqueeze(1),
        )


def turned(x: torch.Tensor, angles: Angles) -> torch.Tensor:
    """`x` of [rows, heads, head_dim] with every head turned by its row's angle."""
    return torch.addcmul(x * angles.cosine, x.roll(x.shape[-1] // 2, dims=-1), angles.sine)
