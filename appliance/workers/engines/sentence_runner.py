"""Run a model through sentence-transformers' own modules, from token ids, in padded sub-batches.

The modules (transformer, pooling, dense, normalize, …), their order and their settings come from the model's folder, so
whatever sentence-transformers can load is run as its authors meant it. What needs more than token ids is refused.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

# Padding that one pass may carry before another pass is cheaper, in tokens. On a CPU measured with MiniLM in bf16 on
# one thread and batches of 16 and 64 mixed texts: 64 to 128 are the best, no limit runs at 0.3 to 0.7 of their speed.
# On a GPU a pass has a far higher fixed cost; that number is an estimate.
_PADDING_TOKENS_MAX = {"cpu": 128}
_PADDING_TOKENS_MAX_ELSEWHERE = 4096
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

    def run(self, texts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        """See `Runner.run`."""
        rows = np.empty((len(texts), self.width), dtype=np.float32)
        limit = _PADDING_TOKENS_MAX.get(self._model.device.type, _PADDING_TOKENS_MAX_ELSEWHERE)
        for positions in sub_batches([len(text) for text in texts], padding_tokens_max=limit):
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
        features = {"input_ids": torch.from_numpy(ids).to(device), "attention_mask": torch.from_numpy(mask).to(device)}
        if self._has_token_types:
            features["token_type_ids"] = torch.zeros_like(features["input_ids"])
        vectors: torch.Tensor = self._model(features)["sentence_embedding"]
        return vectors[:, : self.width].float().cpu().numpy()  # a model may be saved with a shorter Matryoshka width


def _spread(flat: torch.Tensor) -> torch.Tensor:
    return flat[:: max(1, flat.numel() // _SAMPLES_PER_WEIGHT)]


def sub_batches(lengths: Sequence[int], *, padding_tokens_max: int) -> Iterator[list[int]]:
    """Positions grouped by similar length, longest first; a group's padding stays within the limit."""
    group: list[int] = []
    padding_tokens = 0
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        short_of_longest = lengths[group[0]] - lengths[position] if group else 0
        if padding_tokens + short_of_longest > padding_tokens_max:
            yield group
            group, padding_tokens, short_of_longest = [], 0, 0
        group.append(position)
        padding_tokens += short_of_longest
    if group:
        yield group


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


def _has_token_types(tokenizer: PreTrainedTokenizerBase) -> bool:
    types = tokenizer("a b").get("token_type_ids")
    if types is not None and any(types):
        raise ValueError("the model wants token types other than 0 for a single text, which is not served")
    return types is not None
