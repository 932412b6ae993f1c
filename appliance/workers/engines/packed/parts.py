"""Parts of a stack, made of the weights that are named for them."""

import torch

from appliance.workers.engines.packed.linear import Linear
from appliance.workers.engines.packed.rotary import Rotary
from appliance.workers.engines.packed.stack import GatedMlp, LayerNorm
from appliance.workers.engines.packed.unsupported import Unsupported
from appliance.workers.engines.packed.weights import Weights


def layer_norm(weights: Weights, name: str, width: int, epsilon: float, *, has_bias: bool = True) -> LayerNorm:
    bias = weights.take_bias(f"{name}.bias", width, is_used=has_bias)
    return LayerNorm(weights.take(f"{name}.weight", width), bias, epsilon)


def linear(
    weights: Weights, name: str, size: int, width: int, *, has_bias: bool = True, activation: str | None = None
) -> Linear:
    """A product of [rows, width] to [rows, size]."""
    bias = weights.take_bias(f"{name}.bias", size, is_used=has_bias)
    return Linear(weights.take(f"{name}.weight", size, width), bias, activation=activation)


def joined(weights: Weights, names: list[str], sizes: list[int], width: int, *, has_bias: bool) -> Linear:
    """Several products of the same rows as one."""
    weight = torch.cat([weights.take(f"{name}.weight", n, width) for name, n in zip(names, sizes, strict=True)])
    if not has_bias:
        return Linear(weight)
    return Linear(weight, torch.cat([weights.take(f"{name}.bias", n) for name, n in zip(names, sizes, strict=True)]))


def gated(weights: Weights, name: str, width: int, inner: int, activation: str) -> GatedMlp:
    return GatedMlp(
        linear(weights, f"{name}.gate_proj", inner, width, has_bias=False, activation=activation),
        linear(weights, f"{name}.up_proj", inner, width, has_bias=False),
        linear(weights, f"{name}.down_proj", width, inner, has_bias=False),
    )


def rotary_of(weights: Weights, head_dim: int, theta: float, positions_max: int) -> Rotary:
    return Rotary(
        head_dim=head_dim, theta=theta, positions_max=positions_max, dtype=weights.dtype, device=weights.device
    )


def size_of_head(width: int, heads: int) -> int:
    if width % heads:
        raise Unsupported(f"hidden_size {width} is no multiple of {heads} heads")
    return width // heads
