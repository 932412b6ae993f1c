"""A causal model on the packed stack: the tokens of a pass in, the logits of the rows that want them out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from appliance.workers.engines.generator.cache import Cache, Cached, Run
from appliance.workers.engines.packed import config
from appliance.workers.engines.packed.decoders import DECODERS
from appliance.workers.engines.packed.linear import Linear
from appliance.workers.engines.packed.pack import shared_size
from appliance.workers.engines.packed.stack import Stack
from appliance.workers.engines.packed.weights import Weights

# Sizes of small passes: each is one of oneDNN's kernels, see `shared_size`.
_SMALL_SIZES: Final = (1, 2, 4, 8)

Logits = npt.NDArray[np.float32]


class CausalModel:
    """One model and the cache of its sequences."""

    def __init__(self, stack: Stack, head: Linear, cache: Cache, *, device: str, weights_bytes: int) -> None:
        self.vocabulary = stack.vocabulary
        self.weights_bytes = weights_bytes
        self.cache = cache
        self._stack = stack
        self._head = head
        self._device = device

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype, device: str, places: int, tokens_max: int) -> "CausalModel":
        """From a local folder of safetensors, for so many sequences at once of at most `tokens_max` tokens each.

        Raises `Unsupported` for an architecture that it does not know, ValueError for files that are not complete.
        """
        kind = config.check_causal(folder)
        settings = config.read_decoder(folder)
        with torch.inference_mode():
            weights = Weights(folder, dtype=dtype, device=device, prefix="model")
            stack = DECODERS[kind](folder, weights)
            is_tied = settings.tie_word_embeddings or not weights.has("lm_head.weight")
            head = stack.embedding.words if is_tied else weights.take("lm_head.weight", stack.vocabulary, stack.width)
            attention = stack.layers[0].attention
            cache = Cache(
                layers=len(stack.layers),
                places=places,
                capacity=min(tokens_max, settings.max_position_embeddings),
                key_heads=attention.key_heads,
                head_dim=attention.head_dim,
                dtype=dtype,
                device=device,
            )
        weights.log_unused()
        return cls(stack, Linear(head), cache, device=device, weights_bytes=weights.bytes_taken)

    @torch.inference_mode()
    def __call__(self, ids: npt.NDArray[np.int32], runs: Sequence[Run], wanted: Sequence[int]) -> Logits:
        """`ids` are the tokens of `runs`, end to end. Returns [wanted rows, vocabulary], float32."""
        rows = self._size(len(ids)) if self._device == "cpu" else len(ids)
        padded = np.zeros(rows, dtype=np.int32)
        padded[: len(ids)] = ids
        positions = np.zeros(rows, dtype=np.int32)
        for run in runs:
            positions[run.row : run.row + run.rows] = np.arange(run.start, run.start + run.rows)
        plan = self.cache.plan(runs, rows=rows)
        rotary = self._stack.views[0].rotary
        angles = rotary.angles(torch.from_numpy(positions).to(self._device)) if rotary is not None else None
        x = functional.embedding(torch.from_numpy(padded).to(self._device), self._stack.embedding.words)
        for layer, cache in zip(self._stack.layers, self.cache.layers, strict=True):
            x = layer(x, Cached(cache, plan, angles))
        if not wanted:
            return np.empty((0, self.vocabulary), dtype=np.float32)
        x = x[torch.tensor(wanted, device=self._device)]
        if self._stack.final_norm is not None:
            x = self._stack.final_norm(x)
        logits: Logits = self._head(x).float().cpu().numpy()
        return logits

    def _size(self, rows: int) -> int:
        """The rows of a pass. In float32 the kernel for a single row is another, which rounds otherwise."""
        sizes = _SMALL_SIZES[1:] if self._stack.embedding.words.dtype == torch.float32 else _SMALL_SIZES
        return next((size for size in sizes if rows <= size), 0) or shared_size(rows)
