"""From logits to the next token: penalties, biases, and which tokens are drawn how often."""

from collections import Counter

import numpy as np
import pytest

from appliance.jobs import Sampling
from appliance.workers.engines.generator.sampling import Logits, adjusted, chosen, ranked

DRAWS = 10_000
NONE = np.array([], dtype=np.int32)


def logits_of(*probabilities: float) -> Logits:
    return np.log(np.array(probabilities, dtype=np.float32))


def drawn(logits: Logits, sampling: Sampling) -> dict[int, float]:
    """How often each token is, over all chances."""
    counts = Counter(chosen(logits, sampling, chance=(draw + 0.5) / DRAWS) for draw in range(DRAWS))
    return {token: round(count / DRAWS, 2) for token, count in sorted(counts.items())}


@pytest.mark.parametrize(
    ("sampling", "shares"),
    [
        (Sampling(), {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        (Sampling(temperature=0.5), {0: 0.03, 1: 0.53, 2: 0.13, 3: 0.3}),  # p ** 2, as shares
        (Sampling(temperature=0.0), {1: 1.0}),
        (Sampling(temperature=1e-8), {1: 1.0}),
        (Sampling(temperature=1e-50), {1: 1.0}),
        (Sampling(top_k=2), {1: 0.57, 3: 0.43}),
        (Sampling(top_k=9), {0: 0.1, 1: 0.4, 2: 0.2, 3: 0.3}),
        (Sampling(top_p=0.6), {1: 0.57, 3: 0.43}),
        (Sampling(top_p=0.01), {1: 1.0}),
        (Sampling(min_p=0.6), {1: 0.57, 3: 0.43}),
        (Sampling(top_k=3, top_p=0.5), {1: 0.57, 3: 0.43}),  # of the three: 0.44, 0.33, 0.22
    ],
)
def test_tokens_are_drawn_as_often_as_their_probability(sampling: Sampling, shares: dict[int, float]) -> None:
    assert drawn(logits_of(0.1, 0.4, 0.2, 0.3), sampling) == pytest.approx(shares, abs=0.011)


def test_what_is_masked_is_never_drawn() -> None:
    masked = logits_of(0.5, 0.5, 0.5, 0.5)
    masked[[0, 2]] = -np.inf

    assert drawn(masked, Sampling(temperature=2.0)) == {1: 0.5, 3: 0.5}
    assert drawn(masked, Sampling(top_p=0.3)) in ({1: 1.0}, {3: 1.0})


def test_top_p_looks_beyond_the_first_tokens_where_it_must() -> None:
    even = np.zeros(5000, dtype=np.float32)

    assert len({chosen(even, Sampling(top_p=0.5), chance=(draw + 0.5) / DRAWS) for draw in range(DRAWS)}) == 2500


def test_nothing_is_copied_where_nothing_changes() -> None:
    logits = logits_of(0.5, 0.5)

    assert adjusted(logits, Sampling(frequency_penalty=1.0), written=Counter(), prompt=NONE) is logits


def test_penalties_are_of_what_was_written_and_the_repetition_penalty_of_the_prompt_too() -> None:
    logits = np.array([1.0, -1.0, 2.0, 0.5], dtype=np.float32)
    written, prompt = Counter({0: 3, 1: 1}), np.array([2, 2], dtype=np.int32)

    def after(sampling: Sampling) -> list[float]:
        found: list[float] = adjusted(logits, sampling, written=written, prompt=prompt).tolist()
        return found

    assert after(Sampling(frequency_penalty=0.5)) == [1.0 - 1.5, -1.0 - 0.5, 2.0, 0.5]
    assert after(Sampling(presence_penalty=0.5)) == [0.5, -1.5, 2.0, 0.5]
    assert after(Sampling(repetition_penalty=2.0)) == [0.5, -2.0, 1.0, 0.5]
    biased = adjusted(logits, Sampling(logit_bias=((3, 100.0), (0, -1.0))), written=Counter(), prompt=NONE)
    assert biased.tolist() == [0.0, -1.0, 2.0, 100.5]
    assert logits.tolist() == [1.0, -1.0, 2.0, 0.5]


def test_log_probabilities_are_ranked() -> None:
    found = ranked(logits_of(0.1, 0.4, 0.2, 0.3), 2, top=3)

    assert found.top_ids == (1, 3, 2)
    assert [found.logprob, *found.top_logprobs] == pytest.approx(np.log([0.2, 0.4, 0.3, 0.2]).tolist(), abs=1e-6)
    assert ranked(logits_of(0.5, 0.5), 0, top=0).top_ids == ()
