"""What a classifier's folder says about its labels, and how its logits become scores.

    config.json                         id2label, problem_type, sentence_transformers.activation_fn
    config_sentence_transformers.json   activation_fn

An activation that the model's authors name wins. Without one, sentence-transformers puts a single label through the
sigmoid, and transformers puts several through the softmax unless the problem is one of several labels at once.
"""

from pathlib import Path
from typing import Final, TypeVar

import msgspec

from appliance.workers import model_files

_T = TypeVar("_T")

_ACTIVATIONS: Final = {"Sigmoid": "sigmoid", "Identity": "identity", "Softmax": "softmax"}
_LABELS_DEFAULT: Final = 2  # of a config that names none


class LabelCard(msgspec.Struct, frozen=True):
    """The labels in the order of the logits, and "sigmoid", "softmax" or "identity"."""

    labels: tuple[str, ...]
    activation: str


class _SentenceTransformers(msgspec.Struct, frozen=True):
    activation_fn: str | None = None


class _Config(msgspec.Struct, frozen=True):
    id2label: dict[str, str] | None = None
    num_labels: int | None = None
    problem_type: str | None = None
    sentence_transformers: _SentenceTransformers = _SentenceTransformers()
    sbert_ce_default_activation_function: str | None = None


def label_card(folder: Path, *, task: str) -> LabelCard:
    """The card of the model in `folder`. Raises ValueError for labels or an activation that cannot be served."""
    for module in model_files.modules(folder)[1:]:
        raise ValueError(f"the module {module.type!r} after a classifier is not served")
    config = _read(model_files.transformer_folder(folder) / "config.json", _Config)
    labels = _labels(config)
    if task == "tag":
        return LabelCard(labels, "softmax")
    saved = _read(folder / "config_sentence_transformers.json", _SentenceTransformers)
    stated = (
        saved.activation_fn or config.sentence_transformers.activation_fn or config.sbert_ce_default_activation_function
    )
    return LabelCard(labels, _activation(stated, config.problem_type, len(labels)))


def _labels(config: _Config) -> tuple[str, ...]:
    if config.id2label is None:
        return tuple(f"LABEL_{number}" for number in range(config.num_labels or _LABELS_DEFAULT))
    numbers = [str(number) for number in range(len(config.id2label))]
    if not numbers or set(numbers) != config.id2label.keys():
        raise ValueError("config.json does not number its id2label from 0")
    return tuple(config.id2label[number] for number in numbers)


def _activation(stated: str | None, problem: str | None, labels: int) -> str:
    if stated is not None:
        name = stated.rsplit(".", 1)[-1]
        if not stated.startswith("torch.nn.") or name not in _ACTIVATIONS:
            raise ValueError(f"the activation {stated!r} is none of {', '.join(_ACTIVATIONS)} of torch.nn")
        return _ACTIVATIONS[name]
    if labels == 1 or problem == "multi_label_classification":
        return "sigmoid"
    return "identity" if problem == "regression" else "softmax"


def _read(path: Path, kind: type[_T]) -> _T:
    """The defaults when there is no such file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        return kind()
    except msgspec.DecodeError as exc:  # covers ValidationError
        raise ValueError(f"{path.name} cannot be read: {exc}") from exc
