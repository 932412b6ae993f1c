"""From a model's logits to what a task asked for: relevance, label probabilities, spans of text. Pure."""

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from appliance.jobs import Span

Logits = npt.NDArray[np.float32]
Activation = Literal["sigmoid", "softmax"]

OUTSIDE = "O"
BEGIN = "B-"
INSIDE = ("I-", "E-", "L-", "S-", "U-", "M-")


def relevance(logits: Logits) -> npt.NDArray[np.float32]:
    """[documents, labels] → [documents], in [0, 1].

    One label is a logit of relevance. Of several the last is the relevant one, as in two-class rerankers.
    """
    if logits.shape[1] == 1:
        return _sigmoid(logits)[:, 0]
    return _softmax(logits)[:, -1]


def probabilities(logits: Logits, *, activation: Activation) -> npt.NDArray[np.float32]:
    """[inputs, labels] → the same, in [0, 1]: labels exclude each other (softmax) or do not (sigmoid)."""
    return _softmax(logits) if activation == "softmax" else _sigmoid(logits)


def spans(
    logits: Logits,
    *,
    offsets: npt.NDArray[np.int32],
    words: npt.NDArray[np.int32],
    labels: Sequence[str],
    wanted: Sequence[str] = (),
    score_min: float = 0.0,
) -> tuple[Span, ...]:
    """The entities of one text from [tokens, labels] logits.

    `offsets` [tokens, 2] are character positions, `words` [tokens] say which word a token belongs to (-1: none, a
    special token). A word has the label of its first token, which is where such models are trained to put it;
    neighbouring words of one entity type form one span unless the second begins a new one (B-). A span's score is the
    mean of its words'.
    """
    scores = _softmax(logits)
    best = scores.argmax(axis=1)
    found: list[Span] = []
    for entity in _entities(best, words, labels):
        kind = _kind(labels[best[entity[0]]])
        score = float(np.mean([scores[first, best[first]] for first in entity]))
        if score >= score_min and (not wanted or kind in wanted):
            last = np.flatnonzero(words == words[entity[-1]])[-1]
            found.append(Span(int(offsets[entity[0]][0]), int(offsets[last][1]), kind, score))
    return tuple(found)


def kinds(labels: Sequence[str]) -> list[str]:
    """What spans can be, in order: the labels without the positions within an entity, and without the outside."""
    return list(dict.fromkeys(_kind(label) for label in labels if label != OUTSIDE))


def _entities(best: npt.NDArray[np.intp], words: npt.NDArray[np.int32], labels: Sequence[str]) -> Iterator[list[int]]:
    """The entities, each as the first tokens of its words."""
    entity: list[int] = []
    for first in _word_starts(words):
        label = labels[best[first]]
        is_continued = bool(entity) and not label.startswith(BEGIN) and _kind(label) == _kind(labels[best[entity[0]]])
        if entity and not is_continued:
            yield entity
            entity = []
        if label != OUTSIDE:
            entity.append(first)
    if entity:
        yield entity


def _word_starts(words: npt.NDArray[np.int32]) -> list[int]:
    return [index for index, word in enumerate(words) if word >= 0 and (index == 0 or words[index - 1] != word)]


def _kind(label: str) -> str:
    """ "B-PER" and "I-PER" are "PER"; a label without a position is its own kind."""
    return label[2:] if label.startswith((BEGIN, *INSIDE)) else label


def _softmax(logits: Logits) -> npt.NDArray[np.float32]:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    result: npt.NDArray[np.float32] = shifted / shifted.sum(axis=1, keepdims=True)
    return result


def _sigmoid(logits: Logits) -> npt.NDArray[np.float32]:
    # In float64, and split by sign, so that no exponential overflows.
    wide = logits.astype(np.float64)
    tail = np.exp(-np.abs(wide))
    result: npt.NDArray[np.float32] = np.where(wide >= 0, 1 / (1 + tail), tail / (1 + tail)).astype(np.float32)
    return result
