"""Run a model through sentence-transformers' own modules, from token ids, in padded sub-batches.

The modules (transformer, pooling, dense, normalize, …), their order and their settings come from the model's folder, so
whatever sentence-transformers can load is run as its authors meant it. What needs more than token ids is refused.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from appliance.workers.engines.padding import padding_tokens_max, sub_batches

_SAMPLES_PER_WEIGHT = 16


class SentenceTransformersRunner:
    """A `Runner` on sentence-transformers."""

    def __init__(self, model: SentenceTransformer) -> None:
        self._model = model
        transformer = _text_transformer(model)
        _check_poolings(model)
        tokenizer = transformer.tokenizer
        self.vocabulary = int(transformer.model.get_input_embeddings().num_embeddings)
        self.weights_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        width = model.get_embedding_dimension()
        if not width:
            raise ValueError("the model does not say how wide its vectors are")
        self.width = int(width)
        self.has_token_vectors = self.width == _token_width(model)
        self._has_token_types = _has_token_types(tokenizer)
        # RoBERTa-likes count positions by comparing with it, so it must be the model's own.
        self._pad_id = next(
            (pad for pad in (tokenizer.pad_token_id, transformer.config.pad_token_id) if pad is not None), 0
        )

    @classmethod
    def load(cls, folder: Path, *, dtype: torch.dtype, device: str) -> "SentenceTransformersRunner":
        """Load from a local folder that `check_folder` let pass, running none of its code; else ValueError."""
        transformers_logging.disable_progress_bar()
        try:
            model = SentenceTransformer(
                str(folder),
                device=device,
                local_files_only=True,
                trust_remote_code=False,
                model_kwargs={"dtype": dtype, "use_safetensors": True},
            )
        except (OSError, ImportError, KeyError, SafetensorError) as exc:
            raise ValueError(f"the model's files cannot be loaded: {exc}") from exc
        return cls(model.eval())

    def tokenize(self, text: str) -> npt.NDArray[np.int32]:
        """The ids of one text, for the check at load; serving tokenizes in the node."""
        tokenizer = _text_transformer(self._model).tokenizer
        return np.asarray(tokenizer(text, truncation=True)["input_ids"], dtype=np.int32)

    def weight_samples(self, dtype: torch.dtype) -> dict[str, list[float]]:
        """A few numbers of each weight, as `dtype` holds them: tells two loads of the same file apart from others."""
        return {
            # Poolers are often absent from the files and never used: pooling works on token vectors.
            name: _spread(weight.detach().flatten()).to(dtype).float().tolist()
            for name, weight in self._model.named_parameters()
            if "pooler" not in name.split(".")
        }

    def run(
        self,
        texts: Sequence[npt.NDArray[np.int32]],
        second_starts: Sequence[int] = (),
        per_token: Sequence[int] = (),
    ) -> npt.NDArray[np.float32]:
        """See `Runner.run`. Raises ValueError for a text with a second part."""
        if any(second_starts):
            raise ValueError("an embedding model takes single texts")
        parts: list[npt.NDArray[np.float32]] = [np.empty(0, dtype=np.float32)] * len(texts)
        limit = padding_tokens_max(self._model.device.type)
        wanted = frozenset(per_token)
        for positions in sub_batches([len(text) for text in texts], padding_tokens_max=limit):
            is_per_token = [position in wanted for position in positions]
            answers = self._run_padded([texts[position] for position in positions], is_per_token)
            for position, answer in zip(positions, answers, strict=True):
                parts[position] = answer
        return np.concatenate(parts)

    @torch.inference_mode()
    def _run_padded(
        self, texts: Sequence[npt.NDArray[np.int32]], is_per_token: Sequence[bool]
    ) -> list[npt.NDArray[np.float32]]:
        """[rows, width] of each text."""
        longest = max(len(text) for text in texts)
        ids = np.full((len(texts), longest), self._pad_id, dtype=np.int64)
        mask = np.zeros((len(texts), longest), dtype=np.int64)
        for row, text in enumerate(texts):
            ids[row, : len(text)] = text
            mask[row, : len(text)] = 1
        device = self._model.device
        features = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
        if self._has_token_types:
            features["token_type_ids"] = torch.zeros_like(features["input_ids"])
        found = self._model(features)
        # A model may be saved with a shorter Matryoshka width.
        pooled: npt.NDArray[np.float32] = found["sentence_embedding"][:, : self.width].float().cpu().numpy()
        return [
            found["token_embeddings"][row, : len(text)].float().cpu().numpy() if wanted else pooled[row : row + 1]
            for row, (text, wanted) in enumerate(zip(texts, is_per_token, strict=True))
        ]


def _spread(flat: torch.Tensor) -> torch.Tensor:
    return flat[:: max(1, flat.numel() // _SAMPLES_PER_WEIGHT)]


def _text_transformer(model: SentenceTransformer) -> Transformer:
    """The first module, which must take plain token ids. Raises ValueError when it does not."""
    first = model[0]
    if not isinstance(first, Transformer):
        raise ValueError(f"the first module is {type(first).__name__}; only Transformer is served")
    if first.modality_config.get("text", {}).get("method") != "forward" or "message" in first.modality_config:
        raise ValueError("the model wants chat messages or other inputs than text")
    if first.processing_kwargs:
        raise ValueError("the model asks for processing_kwargs of its own, which are not served")
    return first


def _check_poolings(model: SentenceTransformer) -> None:
    for module in model:
        if isinstance(module, Pooling) and not module.include_prompt:
            raise ValueError("the pooling leaves the prompt out (include_prompt=false), which is not served")


def _token_width(model: SentenceTransformer) -> int:
    """Of the token vectors that are pooled into the model's own; 0 where what follows makes something else of them."""
    transformer, *others = model
    if not all(isinstance(module, Pooling | Normalize) for module in others):
        return 0
    assert isinstance(transformer, Transformer), "checked before"
    return int(transformer.get_embedding_dimension())


def _has_token_types(tokenizer: PreTrainedTokenizerBase) -> bool:
    types = tokenizer("a b").get("token_type_ids")
    if types is not None and any(types):
        raise ValueError("the model wants token types other than 0 for a single text, which is not served")
    return types is not None
