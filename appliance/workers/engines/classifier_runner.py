"""Run a classifier through transformers' own model, from token ids, in padded sub-batches.

The reference for the packed heads, and the way of every other architecture.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from appliance.workers import model_files
from appliance.workers.engines.padding import padding_tokens_max, sub_batches
from appliance.workers.engines.transformers_model import load_model

_AUTO: Final = {"score": AutoModelForSequenceClassification, "tag": AutoModelForTokenClassification}


class ClassifierRunner:
    """A `Runner` on transformers: logits of texts ("score") or of tokens ("tag")."""

    def __init__(self, model: PreTrainedModel, inner: Path, *, task: str) -> None:
        self._model = model
        self._inner = inner
        self._is_per_token = task == "tag"
        self.has_token_vectors = False
        self.vocabulary = int(model.get_input_embeddings().num_embeddings)
        self.weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        self.width = int(model.config.num_labels)
        pad_id = model.config.pad_token_id
        self._pad_id = 0 if pad_id is None else int(pad_id)
        self._types = int(getattr(model.config, "type_vocab_size", 0) or 0)

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype, device: str, task: str) -> "ClassifierRunner":
        """Load from a local folder that `check_folder` let pass, running none of its code; else ValueError."""
        inner = model_files.transformer_folder(folder)
        model = load_model(_AUTO[task], inner, dtype=dtype, device=device)
        return cls(model, inner, task=task)

    def tokenize(self, text: str, second: str | None, *, tokens_max: int) -> tuple[npt.NDArray[np.int32], int]:
        """The ids of a text or pair, for the check at load, and where token type 1 begins, 0 for nowhere."""
        tokenizer = AutoTokenizer.from_pretrained(str(self._inner), local_files_only=True, trust_remote_code=False)
        encoded = tokenizer(text, second, truncation="longest_first", max_length=tokens_max)
        types = encoded.get("token_type_ids") or []
        return np.asarray(encoded["input_ids"], dtype=np.int32), types.index(1) if 1 in types else 0

    def run(
        self,
        texts: Sequence[npt.NDArray[np.int32]],
        second_starts: Sequence[int] = (),
        per_token: Sequence[int] = (),
    ) -> npt.NDArray[np.float32]:
        """See `Runner.run`."""
        assert not per_token, "the task alone says of what a classifier gives rows"
        second_starts = second_starts or [0] * len(texts)
        parts: list[npt.NDArray[np.float32]] = [np.empty(0, dtype=np.float32)] * len(texts)
        limit = padding_tokens_max(self._model.device.type)
        for positions in sub_batches([len(text) for text in texts], padding_tokens_max=limit):
            answers = self._run_padded(
                [texts[position] for position in positions], [second_starts[position] for position in positions]
            )
            for position, answer in zip(positions, answers, strict=True):
                parts[position] = answer[: len(texts[position])] if self._is_per_token else answer[None]
        return np.concatenate(parts)

    @torch.inference_mode()
    def _run_padded(
        self, texts: Sequence[npt.NDArray[np.int32]], second_starts: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        longest = max(len(text) for text in texts)
        ids = np.full((len(texts), longest), self._pad_id, dtype=np.int64)
        mask = np.zeros((len(texts), longest), dtype=np.int64)
        types = np.zeros((len(texts), longest), dtype=np.int64)
        for row, (text, second) in enumerate(zip(texts, second_starts, strict=True)):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
            if second > 0:
                types[row, second : len(text)] = 1
        device = self._model.device
        features = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
        if self._types > 1:
            features["token_type_ids"] = torch.from_numpy(types).to(device)
        logits: npt.NDArray[np.float32] = self._model(**features).logits.float().cpu().numpy()
        return logits
