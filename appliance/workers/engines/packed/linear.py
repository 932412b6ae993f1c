"""Matrix products with the weights laid out as the CPU's kernels want them.

oneDNN reorders a weight at each call unless it is handed over already reordered; in bfloat16 on a CPU with AMX that is
a fifth of the time of a large product and half the time of a small one (MiniLM's shapes, one thread). The reordered
product also takes what follows it, an activation or the residual, into the same pass over memory.
"""

import torch
from torch.nn import functional

from appliance.workers.engines.packed.unsupported import Unsupported

# By transformers' names. "gelu_new" and "gelu_fast" are the tanh form written out.
_ACTIVATIONS = {
    "gelu": ("gelu", "none"),
    "gelu_new": ("gelu", "tanh"),
    "gelu_fast": ("gelu", "tanh"),
    "gelu_pytorch_tanh": ("gelu", "tanh"),
    "relu": ("relu", ""),
    "silu": ("swish", ""),
    "swish": ("swish", ""),
}
_REORDERED_DTYPES = (torch.float32, torch.bfloat16)


class Linear:
    """y = x W^T + b for x of [rows, in]; W is [out, in]."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, activation: str | None = None
    ) -> None:
        """`activation` is applied to y by `activated`. Raises `Unsupported` for one that is not known."""
        if activation is not None and activation not in _ACTIVATIONS:
            raise Unsupported(f"the activation {activation!r}")
        self.activation = _ACTIVATIONS[activation] if activation is not None else ("none", "")
        self.width_in = int(weight.shape[1])
        self._bias = bias
        self._is_reordered = _can_reorder(weight)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self._is_reordered else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._is_reordered:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
            return y
        return functional.linear(x, self._weight, self._bias)

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        """activation(x W^T + b)"""
        name, form = self.activation
        if self._is_reordered:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, name, [], form)
            return y
        y = functional.linear(x, self._weight, self._bias)
        match name:
            case "gelu":
                return functional.gelu(y, approximate=form)
            case "relu":
                return functional.relu(y)
            case "swish":
                return functional.silu(y)
            case _:
                return y

    def added(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + x W^T + b"""
        if self._is_reordered:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self._weight, self._bias, "add")
            return y
        return functional.linear(x, self._weight, self._bias).add_(residual)


def _can_reorder(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in _REORDERED_DTYPES:
        return False
    # Builds for some CPUs come without oneDNN.
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise") or not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    return weight.dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
