"""A `Runner` without padding."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from appliance.workers import model_files
from appliance.workers.engines.packed.classify import Classifier, load_classifier
from appliance.workers.engines.packed.families import family_of, keys_multiple
from appliance.workers.engines.packed.modules import Head, load_head
from appliance.workers.engines.packed.pack import Pack, pack
from appliance.workers.engines.packed.stack import Stack
from appliance.workers.engines.packed.weights import Weights

# Tokens of one pass. On a CPU measured with MiniLM in bfloat16 on one thread: 1,024 to 2,048 are the best, 256 runs at
# 0.8 of their speed, 4,096 at 0.9: what lies between the layers should stay in the cache. A GPU only needs a bound on
# that memory; its number is an estimate.
_TOKENS_MAX: Final = {"cpu": 2048}
_TOKENS_MAX_ELSEWHERE: Final = 65_536


class PackedRunner:
    """One model whose batches run end to end; see the package."""

    def __init__(self, stack: Stack, head: Head | Classifier, *, device: str, weights_bytes: int) -> None:
        self.width = head.width
        self.vocabulary = stack.vocabulary
        self.has_token_vectors = isinstance(head, Head) and head.has_token_vectors
        self.weights_bytes = weights_bytes
        self._stack = stack
        self._head = head
        self._device = device
        self._keys_multiple = keys_multiple(device)
        self._tokens_max = _TOKENS_MAX.get(device, _TOKENS_MAX_ELSEWHERE)

    @classmethod
    def load(
        cls, folder: Path, *, dtype: torch.dtype, device: str, task: str = "embed", labels: int = 0
    ) -> "PackedRunner":
        """Load from a local folder of safetensors; `task` and its number of labels are those of `wire.Load`.

        Raises `Unsupported` for a model that needs another runner, ValueError for one whose files are not complete.
        """
        inner = model_files.transformer_folder(folder)
        family = family_of(inner)
        with torch.inference_mode():
            weights = Weights(inner, dtype=dtype, device=device, prefix=family.prefix, rename=family.rename)
            stack = family.build(inner, weights)
            head: Head | Classifier = (
                load_head(folder, token_width=stack.width, device=device)
                if task == "embed"
                else load_classifier(folder, task=task, labels=labels, token_width=stack.width, device=device)
            )
        weights.log_unused()
        return cls(stack, head, device=device, weights_bytes=weights.bytes_taken + head.weights_bytes)

    def run(
        self,
        texts: Sequence[npt.NDArray[np.int32]],
        second_starts: Sequence[int] = (),
        per_token: Sequence[int] = (),
    ) -> npt.NDArray[np.float32]:
        """See `Runner.run`."""
        groups = list(passes([len(text) for text in texts], tokens_max=self._tokens_max))
        wanted = frozenset(per_token)
        rows = [
            self._run(
                texts[start:end],
                second_starts[start:end],
                [position - start for position in range(start, end) if position in wanted] if wanted else (),
            )
            for start, end in groups
        ]
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    def _run(
        self, texts: Sequence[npt.NDArray[np.int32]], second_starts: Sequence[int], per_token: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        rows = self._pass(texts, second_starts, per_token)
        if len(texts) > 1 and not np.isfinite(rows).all():
            # A text's attention reads masked rows of its neighbours, and 0 times infinity is not a number: only a text
            # that fails alone is at fault.
            counts = [
                len(text) if self._head.is_per_token or position in per_token else 1
                for position, text in enumerate(texts)
            ]
            for position, end in enumerate(np.cumsum(counts).tolist()):
                own = slice(end - counts[position], end)
                if not np.isfinite(rows[own]).all():
                    alone = (0,) if position in per_token else ()
                    rows[own] = self._pass([texts[position]], second_starts[position : position + 1], alone)
        return rows

    @torch.inference_mode()
    def _pass(
        self, texts: Sequence[npt.NDArray[np.int32]], second_starts: Sequence[int], per_token: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        batch = pack(
            texts,
            device=self._device,
            keys_multiple=self._keys_multiple,
            first_position=self._stack.first_position,
            pad_id=self._stack.pad_id,
            second_starts=second_starts,
        )
        hidden = self._stack(batch)
        rows = self._head(hidden, batch)
        if per_token:
            rows = _with_tokens(rows, hidden, batch, per_token)
        answer: npt.NDArray[np.float32] = rows.cpu().numpy()
        return answer


def _with_tokens(pooled: torch.Tensor, hidden: torch.Tensor, batch: Pack, per_token: Sequence[int]) -> torch.Tensor:
    """`pooled` [texts, width], the rows of the texts at `per_token` replaced by those of their tokens."""
    parts = [
        hidden[segment.start : segment.start + segment.length].float()
        if position in per_token
        else pooled[position : position + 1]
        for position, segment in enumerate(batch.segments)
    ]
    return torch.cat(parts)


def passes(lengths: Sequence[int], *, tokens_max: int) -> Iterator[tuple[int, int]]:
    """Start and end of consecutive texts of together at most `tokens_max` tokens; a longer text goes alone."""
    start, tokens = 0, 0
    for position, length in enumerate(lengths):
        if position > start and tokens + length > tokens_max:
            yield start, position
            start, tokens = position, 0
        tokens += length
    yield start, len(lengths)
