"""From logits to the next token. Pure: the chance that decides is an argument."""

from collections import Counter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from appliance.jobs import Sampling

Logits = npt.NDArray[np.float32]
_FIRST_LOOK: Final = 256  # of the most probable tokens: as a rule they hold all that top_p asks for


class Ranked(NamedTuple):
    """The log-probabilities of a place: of one token, and of the most probable ones, best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


TEMPERATURE_MIN: Final = 1e-5  # below, nothing but the most probable token is ever drawn; and float32 ends


def adjusted(logits: Logits, sampling: Sampling, *, written: Counter[int], prompt: npt.NDArray[np.int32]) -> Logits:
    """Logits with penalties and biases, new where they change.

    `written` counts the text's tokens so far, which OpenAI's penalties are about; the repetition penalty (Keskar et al.
    2019) is about the prompt's tokens too.
    """
    has_penalty = bool(sampling.frequency_penalty or sampling.presence_penalty) and bool(written)
    if not has_penalty and sampling.repetition_penalty == 1.0 and not sampling.logit_bias:
        return logits
    logits = logits.copy()
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.concatenate([prompt, np.fromiter(written, dtype=np.int32, count=len(written))]))
        values = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = np.where(values > 0, values / penalty, values * penalty)
    if has_penalty:
        ids = np.fromiter(written, dtype=np.int64, count=len(written))
        counts = np.fromiter(written.values(), dtype=np.float32, count=len(written))
        logits[ids] -= sampling.frequency_penalty * counts + sampling.presence_penalty
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    return logits


def chosen(logits: Logits, sampling: Sampling, *, chance: float) -> int:
    """The next token; `chance` in [0, 1) decides among those that top_k, top_p and min_p leave."""
    if sampling.temperature < TEMPERATURE_MIN:
        return int(logits.argmax())
    scaled = (logits - logits.max()) / np.float32(sampling.temperature)
    weights = np.exp(scaled, dtype=np.float32)
    if sampling.top_k <= 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0:
        return _drawn(weights, chance)
    order, kept = _kept(weights, sampling)
    return int(order[_drawn(kept, chance)])


def ranked(logits: Logits, token: int, *, top: int) -> Ranked:
    """Log-probabilities of the model itself, before penalties, temperature and grammar."""
    logprobs = logprobs_of(logits)
    if not top:
        return Ranked(float(logprobs[token]), (), ())
    best = np.argpartition(logprobs, -top)[-top:]
    best = best[np.argsort(-logprobs[best], kind="stable")]
    return Ranked(float(logprobs[token]), tuple(best.tolist()), tuple(logprobs[best].tolist()))


def logprobs_of(logits: Logits) -> Logits:
    """log softmax"""
    shifted = logits - logits.max()
    result: Logits = shifted - np.log(np.exp(shifted).sum(dtype=np.float64)).astype(np.float32)
    return result


def _drawn(weights: Logits, chance: float) -> int:
    sums = np.cumsum(weights, dtype=np.float64)
    place = int(np.searchsorted(sums, chance * sums[-1], side="right"))
    return min(place, len(weights) - 1)


def _kept(weights: Logits, sampling: Sampling) -> tuple[npt.NDArray[np.intp], Logits]:
    """The tokens that may be drawn, most probable first, and their weights; one at least."""
    total = float(weights.sum(dtype=np.float64))
    look = min(len(weights), max(sampling.top_k, _FIRST_LOOK))
    order, kept = _best(weights, look)
    if sampling.top_k > 0:
        order, kept = order[: sampling.top_k], kept[: sampling.top_k]
        total = float(kept.sum(dtype=np.float64))
    elif kept.sum(dtype=np.float64) < sampling.top_p * total or sampling.top_p >= 1.0:
        order, kept = _best(weights, len(weights))
    if sampling.top_p < 1.0:
        # The fewest whose probability together is top_p (Holtzman et al. 2020).
        before = np.cumsum(kept, dtype=np.float64) - kept
        count = max(1, int(np.searchsorted(before, sampling.top_p * total, side="left")))
        order, kept = order[:count], kept[:count]
    if sampling.min_p > 0.0:
        count = max(1, int((kept >= sampling.min_p * kept[0]).sum()))
        order, kept = order[:count], kept[:count]
    return order, kept


def _best(weights: Logits, count: int) -> tuple[npt.NDArray[np.intp], Logits]:
    found = np.arange(len(weights)) if count >= len(weights) else np.argpartition(weights, -count)[-count:]
    order = found[np.argsort(-weights[found], kind="stable")]
    return order, weights[order]
