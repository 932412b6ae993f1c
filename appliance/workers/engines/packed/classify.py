"""Heads that give labels to a text (or pair of texts) or to each token, in float32: logits, no activation.

bert                       first token → dense → tanh → labels
roberta, xlm-roberta, mpnet  the same, under other names
modernbert                 first token or mean → dense → activation → norm → labels
each token: bert, roberta, xlm-roberta, mpnet → labels; modernbert → dense → activation → norm → labels
"""

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch

from appliance.workers import model_files
from appliance.workers.engines.packed import config
from appliance.workers.engines.packed.families import family_of
from appliance.workers.engines.packed.linear import Linear
from appliance.workers.engines.packed.modules import check_transformer
from appliance.workers.engines.packed.pack import Pack
from appliance.workers.engines.packed.pooling import MODES, Mode
from appliance.workers.engines.packed.stack import LayerNorm
from appliance.workers.engines.packed.unsupported import Unsupported
from appliance.workers.engines.packed.weights import Weights

Step = Callable[[torch.Tensor], torch.Tensor]

_TEXT_TASKS: Final = {"score": "sequence-classification", "tag": "token-classification"}


class Classifier:
    """Logits from token vectors: a row per text, or per token."""

    def __init__(self, pooling: Mode | None, steps: list[Step], *, labels: int, weights_bytes: int) -> None:
        """`pooling` of None gives labels to tokens."""
        self.width = labels
        self.weights_bytes = weights_bytes
        self.is_per_token = pooling is None
        self._pooling = pooling
        self._steps = steps

    def __call__(self, hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
        """[tokens, model width] → float32 [texts or tokens, labels]"""
        x = hidden.float() if self._pooling is None else self._pooling(hidden, pack)
        for step in self._steps:
            x = step(x)
        return x


def load_classifier(folder: Path, *, task: str, labels: int, token_width: int, device: str) -> Classifier:
    """Read the head of the model in `folder` for "score" or "tag".

    Raises `Unsupported`, or ValueError for missing weights.
    """
    inner = model_files.transformer_folder(folder)
    check_transformer(folder, model_files.modules(folder), task=_TEXT_TASKS[task], output="logits", name="scores")
    weights = Weights(inner, dtype=torch.float32, device=device, prefix=family_of(inner).prefix)
    model_type = config.read_model_type(inner)
    pooling: Mode | None = None
    match model_type, task:
        case "bert", "score":
            pooling, steps = MODES["cls"], [_dense(weights, "pooler.dense", token_width), torch.tanh]
            steps.append(_linear(weights, "classifier", labels, token_width))
        case (("roberta" | "xlm-roberta" | "mpnet"), "score"):
            pooling, steps = MODES["cls"], [_dense(weights, "classifier.dense", token_width), torch.tanh]
            steps.append(_linear(weights, "classifier.out_proj", labels, token_width))
        case (("bert" | "roberta" | "xlm-roberta" | "mpnet"), "tag"):
            steps = [_linear(weights, "classifier", labels, token_width)]
        case "modernbert", _:
            settings = config.read(inner, config.ModernBert)
            if task == "score":
                pooling = _modernbert_pooling(settings)
            steps = [*_modernbert_steps(weights, settings), _linear(weights, "classifier", labels, token_width)]
        case _:
            raise Unsupported(f"model_type {model_type!r} as a classifier")
    return Classifier(pooling, steps, labels=labels, weights_bytes=weights.bytes_taken)


def _modernbert_pooling(settings: config.ModernBert) -> Mode:
    if settings.classifier_pooling not in {"cls", "mean"}:
        raise Unsupported(f"classifier_pooling {settings.classifier_pooling!r}")
    return MODES[settings.classifier_pooling]


def _modernbert_steps(weights: Weights, settings: config.ModernBert) -> list[Step]:
    width = settings.hidden_size
    bias = weights.take_bias("head.dense.bias", width, is_used=settings.classifier_bias)
    dense = Linear(weights.take("head.dense.weight", width, width), bias, activation=settings.classifier_activation)
    norm_bias = weights.take_bias("head.norm.bias", width, is_used=settings.norm_bias)
    return [dense.activated, LayerNorm(weights.take("head.norm.weight", width), norm_bias, settings.norm_eps)]


def _dense(weights: Weights, name: str, width: int) -> Step:
    return _linear(weights, name, width, width)


def _linear(weights: Weights, name: str, size: int, width: int) -> Step:
    return Linear(weights.take(f"{name}.weight", size, width), weights.take(f"{name}.bias", size))
