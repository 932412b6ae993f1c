"""What is sent, and when: send times, text lengths, texts. Pure; randomness comes in as a generator."""

import re
from collections.abc import Iterator
from typing import assert_never

import msgspec
import numpy as np
import orjson

TOKENS_MAX = 32_768  # of one text
INPUTS_MAX = 2048  # of one request, as OpenAI allows
RATE_MAX = 100_000.0  # requests a second
RAMP_STEPS_MAX = 200
SPECIAL_TOKENS = 2  # that an encoder puts around a text
BODIES_MAX = 2048  # distinct requests of one step; then they come again
BODIES_BYTES_MAX = 64 * 1024 * 1024

# One token each for the usual vocabularies, so that a text's length in tokens is known without a tokenizer.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work government number night point home water room mother area money
story fact month lot right study book eye job word business issue side kind head house service friend father power
hour game line end member law car city community name president team minute idea body information back parent face
level office door health person art war history party result change morning reason research girl guy moment air
teacher force education
"""
WORDS = tuple(_WORDS.split())


class FixedLength(msgspec.Struct, frozen=True, tag="fixed"):
    """Every text alike."""

    tokens: int


class UniformLength(msgspec.Struct, frozen=True, tag="uniform"):
    """Each length of a range, both ends included, equally often."""

    tokens_min: int
    tokens_max: int


class LognormalLength(msgspec.Struct, frozen=True, tag="lognormal"):
    """Heavy-tailed, as real texts are: half are shorter than the median; `sigma` is that of the logarithm."""

    tokens_median: float
    sigma: float


Lengths = FixedLength | UniformLength | LognormalLength


class AutoRate(msgspec.Struct, frozen=True, tag="auto"):
    """Double until the objective fails, then bisect to the knee."""

    first: float


class RampRate(msgspec.Struct, frozen=True, tag="ramp"):
    """These rates, in order; a fixed rate is a ramp of one."""

    rates: tuple[float, ...]


Rates = AutoRate | RampRate


def parse_lengths(text: str) -> Lengths:
    """A count "64", a range "8-256" or "lognormal:64:0.8" (median and sigma). Raises ValueError."""
    lengths: Lengths | None = None
    if match := re.fullmatch(r"(\d+)", text):
        lengths = FixedLength(int(match[1]))
    elif match := re.fullmatch(r"(\d+)-(\d+)", text):
        lengths = UniformLength(int(match[1]), int(match[2]))
    elif match := re.fullmatch(r"lognormal:(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", text):
        lengths = LognormalLength(float(match[1]), float(match[2]))
    if lengths is None or not _is_sane(lengths):
        raise ValueError(
            f"{text!r} is no distribution of token counts from 1 to {TOKENS_MAX}; "
            'take one such as "64", "8-256" or "lognormal:64:0.8"'
        )
    return lengths


def parse_rates(text: str) -> Rates:
    """One rate "50", "auto" or "auto:20" (the first rate), or "10:200:10" (first, last, step). Raises ValueError."""
    number = r"(\d+(?:\.\d+)?)"
    if match := re.fullmatch(rf"auto(?::{number})?", text):
        first = float(match[1] or 8.0)
        if 0 < first <= RATE_MAX:
            return AutoRate(first)
    elif match := re.fullmatch(number, text):
        if 0 < float(match[1]) <= RATE_MAX:
            return RampRate((float(match[1]),))
    elif match := re.fullmatch(rf"{number}:{number}:{number}", text):
        first, last, step = (float(part) for part in match.groups())
        if 0 < first <= last <= RATE_MAX and step > 0 and (last - first) / step < RAMP_STEPS_MAX:
            # Half a step of slack, so that rounding never loses the last rate.
            return RampRate(
                tuple(float(rate) for rate in np.arange(first, last + step / 2, step) if rate <= last * 1.001)
            )
    raise ValueError(
        f"{text!r} is no rate of at most {RATE_MAX:.0f} requests a second; take one such as "
        f'"50", "auto", "auto:20" or "10:200:10" (at most {RAMP_STEPS_MAX} steps)'
    )


def poisson_times(rate: float, *, start_s: float, end_s: float, random: np.random.Generator) -> list[float]:
    """Send times in [start_s, end_s) of independent clients who together send `rate` requests a second."""
    times: list[float] = []
    now_s = start_s
    while (now_s := now_s + random.exponential(1.0 / rate)) < end_s:
        times.append(now_s)
    return times


def draw_tokens(lengths: Lengths, count: int, random: np.random.Generator) -> list[int]:
    """The token counts of `count` texts, each in 1..TOKENS_MAX."""
    match lengths:
        case FixedLength(tokens=tokens):
            return [tokens] * count
        case UniformLength(tokens_min=low, tokens_max=high):
            return [int(tokens) for tokens in random.integers(low, high, count, endpoint=True)]
        case LognormalLength(tokens_median=median, sigma=sigma):
            drawn = np.clip(random.lognormal(np.log(median), sigma, count), 1, TOKENS_MAX)
            return [int(tokens) for tokens in np.rint(drawn)]
        case _:
            assert_never(lengths)


def text_of(tokens: int, random: np.random.Generator) -> str:
    """A text of about `tokens` tokens, those that an encoder adds included; at least one word."""
    words = max(1, tokens - SPECIAL_TOKENS)
    return " ".join(WORDS[index] for index in random.integers(0, len(WORDS), words))


def embeddings_bodies(
    *, model: str, lengths: Lengths, inputs: int, count: int, encoding: str, random: np.random.Generator
) -> Iterator[bytes]:
    """`count` bodies for `POST /embeddings`, or as many as the bounds of this module allow, at least one.

    A request of one input carries it as a plain string, as clients do.
    """
    size_bytes = 0
    for _ in range(min(count, BODIES_MAX)):
        texts = [text_of(tokens, random) for tokens in draw_tokens(lengths, inputs, random)]
        body = orjson.dumps(
            {"model": model, "input": texts if inputs > 1 else texts[0], "encoding_format": encoding},
        )
        size_bytes += len(body)
        yield body
        if size_bytes > BODIES_BYTES_MAX:
            return


def _is_sane(lengths: Lengths) -> bool:
    match lengths:
        case FixedLength(tokens=tokens):
            return 1 <= tokens <= TOKENS_MAX
        case UniformLength(tokens_min=low, tokens_max=high):
            return 1 <= low <= high <= TOKENS_MAX
        case LognormalLength(tokens_median=median, sigma=sigma):
            return 1 <= median <= TOKENS_MAX and sigma <= 4
        case _:
            assert_never(lengths)
