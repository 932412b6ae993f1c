"""Attention of each text to itself, in a batch that lies end to end."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn import functional

from appliance.workers.engines.packed.masks import Part
from appliance.workers.engines.packed.pack import Pack

_CAPABILITY_MIN = (8, 0)
_HEAD_DIM_MAX = 256


class Varlen(NamedTuple):
    """One kernel call over all texts, which a GPU has for 16-bit numbers (flash attention)."""

    bounds: torch.Tensor  # int32 [texts + 1]: where each text starts, and the end
    longest: int
    window: tuple[int, int]  # how far a token sees to the left and right; -1: all of it


Plan = Sequence[Part] | Varlen


def varlen_plan(pack: Pack, *, window: tuple[int, int]) -> Varlen:
    starts = [segment.start for segment in pack.segments]
    bounds = torch.tensor([*starts, pack.tokens], dtype=torch.int32, device=pack.ids.device)
    return Varlen(bounds, max(segment.length for segment in pack.segments), window)


def has_varlen(x: torch.Tensor, *, head_dim: int) -> bool:
    """Whether `x` lies on a GPU that has the one kernel for all texts (flash attention: Ampere or later)."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16) or head_dim % 8 or head_dim > _HEAD_DIM_MAX:
        return False
    return torch.cuda.get_device_capability(x.device) >= _CAPABILITY_MIN


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: Plan, *, is_causal: bool) -> torch.Tensor:
    """softmax(q k^T / sqrt(head_dim) + mask) v within each part of the plan.

    q is [rows, heads, head_dim], k and v [rows, key heads, head_dim]; heads are a multiple of key heads. Returns
    [rows, heads * head_dim].
    """
    is_grouped = q.shape[1] != k.shape[1]
    if isinstance(plan, Varlen):
        # It brings torch's compiler with it, which takes longer to import than torch: not where there is no such GPU.
        from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415

        bounds, longest, window = plan
        answer = varlen_attn(q, k, v, bounds, bounds, longest, longest, window_size=window, enable_gqa=is_grouped)
        assert isinstance(answer, torch.Tensor)
        return answer.flatten(1)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    answers = [
        functional.scaled_dot_product_attention(
            queries,
            k.narrow(2, part.key_start, part.keys),
            v.narrow(2, part.key_start, part.keys),
            attn_mask=part.mask,
            is_causal=is_causal,
            enable_gqa=is_grouped,
        ).transpose(1, 2)
        for queries, part in zip(torch.split(q, [part.queries for part in plan], dim=2), plan, strict=True)
    ]
    together = answers[0] if len(answers) == 1 else torch.cat(answers, dim=1)
    return together.reshape(q.shape[2], -1)
