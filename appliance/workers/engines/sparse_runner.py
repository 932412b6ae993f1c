"""Sparse vectors of texts: SPLADE, by a model with a masked-language head (Formal et al. 2021).

The weight of a vocabulary id is the maximum over a text's tokens, special ones included, of log(1 + relu(logit)), as
sentence-transformers' SpladePooling has it. Run through transformers' own model, in padded sub-batches.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel

from appliance.workers import model_files
from appliance.workers.engines.padding import padding_tokens_max, sub_batches
from appliance.workers.engines.transformers_model import load_model

_TOKENS_MAX: Final = 1024  # of one pass, padding included: each token has a logit for every id of the vocabulary


class SparseRunner:
    """A `Runner` whose rows have a number for each id of the vocabulary: [texts, vocabulary]."""

    has_token_vectors = False

    def __init__(self, model: PreTrainedModel, inner: Path) -> None:
        self._model = model
        self._inner = inner
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self.width = self.vocabulary
        self.weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self._pad_id = int(model.config.pad_token_id or 0)

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype, device: str) -> "SparseRunner":
        """Load from a local folder that `check_folder` let pass, running none of its code; else ValueError."""
        inner = model_files.transformer_folder(folder)
        model = load_model(AutoModelForMaskedLM, inner, dtype=dtype, device=device)
        return cls(model, inner)

    def tokenize(self, text: str, *, tokens_max: int) -> npt.NDArray[np.int32]:
        """The ids of a text, for the check at load."""
        tokenizer = AutoTokenizer.from_pretrained(str(self._inner), local_files_only=True, trust_remote_code=False)
        return np.asarray(tokenizer(text, truncation=True, max_length=tokens_max)["input_ids"], dtype=np.int32)

    def run(
        self,
        texts: Sequence[npt.NDArray[np.int32]],
        second_starts: Sequence[int] = (),
        per_token: Sequence[int] = (),
    ) -> npt.NDArray[np.float32]:
        """See `Runner.run`; of single texts only, and never per token."""
        rows = np.empty((len(texts), self.width), dtype=np.float32)
        limit = padding_tokens_max(self._model.device.type)
        for group in sub_batches([len(text) for text in texts], padding_tokens_max=limit):
            size = max(1, _TOKENS_MAX // len(texts[group[0]]))  # the longest comes first
            for start in range(0, len(group), size):
                positions = group[start : start + size]
                rows[positions] = self._run_padded([texts[position] for position in positions])
        return rows

    @torch.inference_mode()
    def _run_padded(self, texts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        longest = max(len(text) for text in texts)
        ids = np.full((len(texts), longest), self._pad_id, dtype=np.int64)
        mask = np.zeros((len(texts), longest), dtype=np.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        device = self._model.device
        seen = torch.from_numpy(mask).to(device)
        logits = self._model(input_ids=torch.from_numpy(ids).to(device), attention_mask=seen).logits
        # Zero is the least that a weight can be: what is masked out never counts.
        weights = torch.log1p(torch.relu(logits.float())).masked_fill_(seen[..., None] == 0, 0.0)
        found: npt.NDArray[np.float32] = weights.amax(dim=1).cpu().numpy()
        return found
