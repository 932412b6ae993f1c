"""Run by Python itself at the start of every process of SGLang on a CPU, before any import; see `sgl_kernel` beside it.

Two things that a CPU build of torch lacks are put right, each just before the module that needs it is first imported:
the operators that torchvision's Python code registers for (its own library is built for CUDA), and pinned memory,
which SGLang's adapters ask for and which only speeds up copies to a GPU.
"""

import functools
import importlib.abc
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

BOXES = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
FACTORIES = ("empty", "full", "ones", "tensor", "zeros", "arange")


def define_torchvision_operators() -> None:
    """Declared, not implemented: text models never call them."""
    import torch  # noqa: PLC0415  # not before somebody needs it: every process of this environment runs this file

    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", BOXES)


def drop_pinned_memory() -> None:
    """Have torch take `pin_memory` and do nothing about it."""
    import torch  # noqa: PLC0415  # as above

    for name in FACTORIES:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*arguments: Any, **options: Any) -> Any:
        options.pop("pin_memory", None)
        return make(*arguments, **options)

    return made


class _Before(importlib.abc.MetaPathFinder):
    """Finds no module; acts when one is looked for the first time."""

    def __init__(self, acts: dict[str, Callable[[], None]]) -> None:
        self._acts = acts

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        act = self._acts.pop(fullname, None)
        if act is not None:
            act()


sys.meta_path.insert(0, _Before({"torchvision": define_torchvision_operators, "sglang.srt.lora": drop_pinned_memory}))
