"""Token vectors → one vector per text, as sentence-transformers defines each mode; sums in float32."""

from collections.abc import Callable
from typing import Final

import torch

from appliance.workers.engines.packed.pack import Pack

Mode = Callable[[torch.Tensor, Pack], torch.Tensor]


def _cls(hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
    return _rows(hidden, [segment.start for segment in pack.segments])


def _last(hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
    return _rows(hidden, [segment.start + segment.length - 1 for segment in pack.segments])


def _rows(hidden: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return hidden[torch.tensor(rows, device=hidden.device)].float()


def _mean(hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
    return _reduced(hidden, pack, "mean")


def _max(hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
    return _reduced(hidden, pack, "max")


def _mean_sqrt(hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
    lengths = torch.tensor([[segment.length] for segment in pack.segments], device=hidden.device)
    return _reduced(hidden, pack, "mean") * lengths.sqrt()


def _weighted_mean(hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
    """Token i of a text, counted from 1, weighs i."""
    lengths = [segment.length for segment in pack.segments]
    weights = torch.cat([torch.arange(1, length + 1, device=hidden.device) for length in lengths])
    totals = torch.tensor([[length * (length + 1) / 2] for length in lengths], device=hidden.device)
    return _reduced(hidden.float() * weights[:, None], pack, "sum") / totals


def _reduced(hidden: torch.Tensor, pack: Pack, how: str) -> torch.Tensor:
    """Each text's rows as one: [texts, width]."""
    lengths = [segment.length for segment in pack.segments]
    if hidden.device.type != "cpu":
        return torch.segment_reduce(hidden.float(), how, lengths=torch.tensor(lengths, device=hidden.device), axis=0)
    # On a CPU one call per text takes a fifth of the time of `segment_reduce`.
    parts = torch.split(hidden, lengths)
    match how:
        case "mean":
            return torch.stack([part.mean(0, dtype=torch.float32) for part in parts])
        case "sum":
            return torch.stack([part.sum(0, dtype=torch.float32) for part in parts])
        case _:
            return torch.stack([part.amax(0) for part in parts]).float()


MODES: Final[dict[str, Mode]] = {
    "cls": _cls,
    "max": _max,
    "mean": _mean,
    "mean_sqrt_len_tokens": _mean_sqrt,
    "weightedmean": _weighted_mean,
    "lasttoken": _last,
}
