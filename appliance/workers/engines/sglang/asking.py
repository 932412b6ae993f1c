"""A node's `Begin` as SGLang's `/generate` takes it. Pure."""

from collections.abc import Container, Sequence
from typing import Final

import msgspec
import numpy as np

from appliance.jobs import Sampling
from appliance.workers.wire import Begin

_SEEDS: Final = 1 << 64


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """SGLang's, those that we send. Stop strings and the text are the node's business: SGLang is asked for ids."""

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: dict[str, float] = {}
    sampling_seed: int | None = None
    ebnf: str | None = None  # to our grammar backend: a grammar in llguidance's JSON
    no_stop_trim: bool = False


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """The body of `/generate`, those fields that we send: a closed list, so nothing else can get in by accident."""

    rid: str
    input_ids: tuple[int, ...]
    sampling_params: SamplingParams
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: int = 0
    token_ids_logprob: tuple[int, ...] | None = None
    lora_path: str | None = None  # the name of an adapter that is loaded


def rid_of(sequence: int) -> str:
    """The request's name in SGLang. All of one length: an abort there means every request whose name begins so."""
    return f"{sequence:016x}"


def request_of(begin: Begin) -> GenerateRequest:
    """What asks for this sequence. The numbers in it have been checked by `check`."""
    ids = tuple(np.frombuffer(begin.ids, dtype="<i4").tolist())
    adapter = begin.adapter or None
    if begin.weighed:
        one = SamplingParams(max_new_tokens=1, temperature=0.0)
        return GenerateRequest(
            rid_of(begin.sequence),
            ids,
            one,
            stream=True,
            return_logprob=True,
            token_ids_logprob=begin.weighed,
            lora_path=adapter,
        )
    return GenerateRequest(
        rid_of(begin.sequence),
        ids,
        sampling_params(begin),
        stream=True,
        return_logprob=begin.top_logprobs is not None,
        top_logprobs_num=begin.top_logprobs or 0,
        lora_path=adapter,
    )


def sampling_params(begin: Begin) -> SamplingParams:
    """The node's sampling in SGLang's words."""
    sampling = begin.sampling
    is_greedy = sampling.temperature == 0 or sampling.top_p == 0  # no probability left to any but the first
    return SamplingParams(
        max_new_tokens=begin.tokens_max,
        temperature=0.0 if is_greedy else sampling.temperature,
        top_p=1.0 if is_greedy else sampling.top_p,
        top_k=-1 if is_greedy else sampling.top_k or -1,
        min_p=0.0 if is_greedy else sampling.min_p,
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        repetition_penalty=sampling.repetition_penalty,
        stop_token_ids=begin.stop_ids,
        logit_bias={str(token): bias for token, bias in sampling.logit_bias},
        sampling_seed=None if sampling.seed is None else signed(sampling.seed),
        ebnf=begin.grammar or None,
        no_stop_trim=True,  # the token that ends a text is one of its ids
    )


def check(begin: Begin, *, vocabulary: int, tokens_max: int, adapters: Container[str]) -> None:
    """Raises ValueError for what SGLang would refuse late, or would die of: an id outside of the vocabulary kills it.

    `adapters` are those that are loaded. SGLang loads one that was unloaded again when a request names it.
    """
    count = len(begin.ids) // 4
    if not count or len(begin.ids) % 4:
        raise ValueError("the prompt has no tokens")
    if begin.tokens_max < 1 or count + begin.tokens_max > tokens_max:
        raise ValueError(f"{count} tokens and an answer of {begin.tokens_max} are over {tokens_max}")
    ids = np.frombuffer(begin.ids, dtype="<i4")
    named = [*begin.weighed, *begin.stop_ids, *(token for token, _ in begin.sampling.logit_bias)]
    if ids.min() < 0 or ids.max() >= vocabulary or not _are_within(named, vocabulary):
        raise ValueError("a token id is outside of the model's vocabulary")
    if begin.adapter and begin.adapter not in adapters:
        raise ValueError("the adapter is not loaded")
    _check_sampling(begin.sampling)


def signed(seed: int) -> int:
    """A seed of any size as the 64-bit number that SGLang takes."""
    low = seed % _SEEDS
    return low - _SEEDS if low >= _SEEDS // 2 else low


def _check_sampling(sampling: Sampling) -> None:
    if not 0 < sampling.repetition_penalty <= 2:
        raise ValueError(f"the repetition penalty is {sampling.repetition_penalty:g}, it must be over 0 and at most 2")


def _are_within(ids: Sequence[int], vocabulary: int) -> bool:
    return all(0 <= token < vocabulary for token in ids)
