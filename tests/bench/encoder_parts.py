"""Where the encoder engine's time goes: products, attention, norms and the rest, of one thread's CPU time.

    python -m tests.bench.encoder_parts [--rounds 9] [--json FILE] [--quick]

It shows what bounds the engine's loop: how near the products are to what one thread does for a large square product,
and what would be left if attention cost nothing. Texts of 8 to 256 tokens, mixed; batches of 4,096 tokens; bfloat16.
"""

import functools
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.bench.harness import LENGTHS, Row, options, parsed, report
from tests.fake_model import packaged_minilm

BATCH_TOKENS = 4096
SQUARE = 1024  # rows and columns of the yardstick product
SEED = 7


class Shares:
    """CPU seconds and floating-point operations by part of the engine, of what was run since `clear`."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.operations = 0.0

    def watch(self, owner: Any, name: str, part: str, *, operations: Callable[..., float] | None = None) -> None:
        """Time every call of `owner.name` as `part`. `Any`: a class or a module."""
        inner = getattr(owner, name)

        @functools.wraps(inner)
        def timed(*arguments: object, **named: object) -> object:
            started_s = time.thread_time()
            result = inner(*arguments, **named)
            self.cpu_s[part] += time.thread_time() - started_s
            if operations is not None:
                self.operations += operations(*arguments)
            return result

        setattr(owner, name, timed)


def main() -> None:
    found = parsed(options(__doc__, rounds=9, round_s=0.0))
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported
    import torch  # noqa: PLC0415

    from appliance.workers.engines.packed import stack  # noqa: PLC0415
    from appliance.workers.engines.packed.linear import Linear  # noqa: PLC0415
    from appliance.workers.engines.packed.runner import PackedRunner  # noqa: PLC0415

    torch.set_num_threads(1)
    runner = PackedRunner.load(Path(packaged_minilm()), dtype=torch.bfloat16, device="cpu")
    chance = random.Random(SEED)
    texts: list[npt.NDArray[np.int32]] = []
    while sum(map(len, texts)) < BATCH_TOKENS - LENGTHS[1]:
        texts.append(np.array(chance.choices(range(2000, 20000), k=chance.randint(*LENGTHS)), dtype=np.int32))
    tokens = sum(map(len, texts))
    runner.run(texts)
    shares = Shares()
    for name in ("__call__", "activated", "added"):
        shares.watch(Linear, name, "products", operations=_operations)
    shares.watch(stack, "attend", "attention")
    shares.watch(stack.LayerNorm, "__call__", "norms")
    square = torch.randn(SQUARE, SQUARE, dtype=torch.bfloat16)
    samples: dict[str, list[float]] = defaultdict(list)
    for _ in range(found.rounds):
        shares.clear()
        started_s = time.thread_time()
        runner.run(texts)
        whole_s = time.thread_time() - started_s
        started_s = time.thread_time()
        torch.mm(square, square)
        peak = 2 * SQUARE**3 / (time.thread_time() - started_s)
        samples["tokens"].append(tokens / whole_s)
        for part, cpu_s in shares.cpu_s.items():
            samples[part].append(cpu_s / whole_s)
        samples["the rest"].append(1 - sum(shares.cpu_s.values()) / whole_s)
        samples["speed"].append(shares.operations / shares.cpu_s["products"])
        samples["peak"].append(shares.operations / shares.cpu_s["products"] / peak)
        samples["free"].append(whole_s / (whole_s - shares.cpu_s["attention"]))
    middle = {name: statistics.median(values) for name, values in samples.items()}
    rows = [
        Row("the engine's pass, one thread", middle["tokens"], "tokens/CPU s"),
        *(Row(f"share of {part}", 100 * middle[part], "%") for part in ("products", "attention", "norms", "the rest")),
        Row("products, activation and residual included", middle["speed"] / 1e9, "GFLOP/s"),
        Row(f"the same / a product of {SQUARE} x {SQUARE}", middle["peak"], "x"),
        Row("speed if attention were free / now", middle["free"], "x"),
    ]
    report("encoder_parts", rows, found)


def _operations(linear: Any, x: Any, *_: object) -> float:
    """Multiplications and additions of a product: rows times weights, twice. `Any`: torch comes late."""
    return 2.0 * float(x.shape[0] * linear._weight.numel())


if __name__ == "__main__":
    main()
