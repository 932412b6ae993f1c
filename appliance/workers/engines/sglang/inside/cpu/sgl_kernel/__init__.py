"""A stand-in for SGLang's CUDA kernels, so that SGLang runs where there is no GPU: for tests and trials, not for load.

SGLang imports `sgl_kernel` on a CPU too. Where `torch.ops.sgl_kernel` has no operators it takes its paths in plain
PyTorch, and one function remains that it calls by name. Every other name fails at the call and says so.
"""

from collections.abc import Callable
from typing import NoReturn

import torch


def assign_req_to_token_pool_cpu(  # noqa: PLR0917 - as SGLang calls it
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Write the places of new tokens into each request's row: consecutive slices of `out_cache_loc`, in request order.

    Request i gets `end_offset[i] - start_offset[i]` of them, from column `start_offset[i]` of its row in `req_to_token`
    ([requests, pool_len]), which is changed in place.
    """
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        if end > pool_len:
            raise IndexError(f"a request of {end} tokens does not fit a row of {pool_len}")
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start


def __getattr__(name: str) -> Callable[..., NoReturn]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is a CUDA kernel; on a CPU there is none")

    return missing
