"""Load: options are read strictly, send times are Poisson, texts have the lengths asked for."""

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bench.schedule import (
    BODIES_MAX,
    RAMP_STEPS_MAX,
    TOKENS_MAX,
    WORDS,
    AutoRate,
    FixedLength,
    Lengths,
    LognormalLength,
    RampRate,
    Rates,
    UniformLength,
    draw_tokens,
    embeddings_bodies,
    parse_lengths,
    parse_rates,
    poisson_times,
    text_of,
)
from appliance.workers.tokenize import Tokenizer
from tests.fake_model import packaged_minilm


def random() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("64", FixedLength(64)),
        ("1", FixedLength(1)),
        (str(TOKENS_MAX), FixedLength(TOKENS_MAX)),
        ("8-256", UniformLength(8, 256)),
        ("8-8", UniformLength(8, 8)),
        ("lognormal:64:0.8", LognormalLength(64, 0.8)),
    ],
)
def test_lengths_are_read(text: str, lengths: Lengths) -> None:
    assert parse_lengths(text) == lengths


@pytest.mark.parametrize(
    "text", ["", "0", "-5", "256-8", "0-8", "8-", "many", "64.5", f"{TOKENS_MAX + 1}", "lognormal:64", "lognormal:0:1"]
)
def test_what_is_no_length_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="lognormal:64"):
        parse_lengths(text)


@pytest.mark.parametrize(
    ("text", "rates"),
    [
        ("50", RampRate((50.0,))),
        ("0.5", RampRate((0.5,))),
        ("auto", AutoRate(8.0)),
        ("auto:20", AutoRate(20.0)),
        ("10:30:10", RampRate((10.0, 20.0, 30.0))),
        ("10:35:10", RampRate((10.0, 20.0, 30.0))),
        ("10:10:5", RampRate((10.0,))),
        ("0.5:1.5:0.5", RampRate((0.5, 1.0, 1.5))),
        (f"1:{RAMP_STEPS_MAX}:1", RampRate(tuple(float(rate) for rate in range(1, RAMP_STEPS_MAX + 1)))),
    ],
)
def test_rates_are_read(text: str, rates: Rates) -> None:
    assert parse_rates(text) == rates


@pytest.mark.parametrize("text", ["", "0", "fast", "auto:0", "10:5:1", "10:20:0", "1e9", f"1:{RAMP_STEPS_MAX + 1}:1"])
def test_what_is_no_rate_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="10:200:10"):
        parse_rates(text)


@given(st.floats(0.5, 500), st.integers(0, 2**32))
def test_send_times_lie_in_the_window_in_order(rate: float, seed: int) -> None:
    times = poisson_times(rate, start_s=-1.0, end_s=2.0, random=np.random.default_rng(seed))

    assert times == sorted(times)
    assert all(-1.0 <= time < 2.0 for time in times)


def test_send_times_are_poisson() -> None:
    gaps = np.diff(poisson_times(100.0, start_s=0.0, end_s=200.0, random=random()))

    assert gaps.mean() == pytest.approx(0.01, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05), "an exponential gap is as wide as it is long"


@pytest.mark.parametrize("text", ["64", "8-256", "lognormal:64:0.8", "lognormal:30000:2"])
def test_drawn_lengths_keep_to_their_distribution(text: str) -> None:
    drawn = draw_tokens(parse_lengths(text), 20_000, random())

    assert min(drawn) >= 1
    assert max(drawn) <= TOKENS_MAX
    match parse_lengths(text):
        case FixedLength(tokens=tokens):
            assert set(drawn) == {tokens}
        case UniformLength(tokens_min=low, tokens_max=high):
            assert (min(drawn), max(drawn)) == (low, high)
            assert np.mean(drawn) == pytest.approx((low + high) / 2, rel=0.02)
        case LognormalLength(tokens_median=median):
            assert np.median(drawn) == pytest.approx(median, rel=0.05)


def test_a_text_has_as_many_tokens_as_asked_for() -> None:
    tokenizer = Tokenizer.load(packaged_minilm(), 256)

    for tokens in (3, 8, 64, 256):
        text = text_of(tokens, random())
        (encoded,) = tokenizer.encode((text,), prompt="", truncation="none", first_index=0)
        assert len(encoded.ids) // 4 == tokens
    assert len(WORDS) == len(set(WORDS))
    assert text_of(1, random()), "never empty"


def test_bodies_are_as_clients_send_them_and_bounded() -> None:
    def bodies(inputs: int, count: int) -> list[bytes]:
        lengths = UniformLength(4, 8)
        return list(
            embeddings_bodies(model="m", lengths=lengths, inputs=inputs, count=count, encoding="float", random=random())
        )

    (single,) = (orjson.loads(body) for body in bodies(1, 1))
    assert (single["model"], single["encoding_format"]) == ("m", "float")
    assert isinstance(single["input"], str)
    (several,) = (orjson.loads(body) for body in bodies(3, 1))
    assert [type(text) for text in several["input"]] == [str] * 3
    assert bodies(1, 5) == bodies(1, 5), "one seed, one load"
    assert len(set(bodies(1, 50))) == 50
    assert len(bodies(1, BODIES_MAX + 1)) == BODIES_MAX
