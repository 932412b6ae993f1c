"""Logits to scores and spans: by hand-made cases, and equal to transformers' own pipelines where they say the same."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.workers import outcomes

LABELS = ("O", "B-PER", "I-PER", "B-ORG", "I-ORG", "MISC")


def logits_of(*labels: str, sure: float = 9.0) -> outcomes.Logits:
    """Tokens that are clearly of these labels."""
    rows = np.zeros((len(labels), len(LABELS)), dtype=np.float32)
    for row, label in enumerate(labels):
        rows[row, LABELS.index(label)] = sure
    return rows


def spans_of(
    text: str, words: list[tuple[str, list[str]]], *, wanted: tuple[str, ...] = (), score_min: float = 0.0
) -> list[tuple[str, str]]:
    """Spans of a text whose words come with the label of each of their tokens, as (text, label)."""
    labels, offsets, numbers, at = ["O"], [(0, 0)], [-1], 0
    for number, (word, of_tokens) in enumerate(words):
        at = text.index(word, at)
        step = max(1, len(word) // len(of_tokens))
        for index, label in enumerate(of_tokens):
            labels.append(label)
            end = at + len(word) if index == len(of_tokens) - 1 else at + (index + 1) * step
            offsets.append((at + index * step, end))
            numbers.append(number)
        at += len(word)
    found = outcomes.spans(
        logits_of(*labels, "O"),
        offsets=np.array([*offsets, (0, 0)], dtype=np.int32),
        words=np.array([*numbers, -1], dtype=np.int32),
        labels=LABELS,
        wanted=wanted,
        score_min=score_min,
    )
    return [(text[span.start : span.end], span.label) for span in found]


def test_neighbouring_words_of_one_kind_are_one_span() -> None:
    words = [("Ada", ["B-PER"]), ("Lovelace", ["I-PER", "O"]), ("met", ["O"]), ("Acme", ["B-ORG"]), ("Inc", ["I-ORG"])]

    assert spans_of("Ada Lovelace met Acme Inc", words) == [("Ada Lovelace", "PER"), ("Acme Inc", "ORG")]


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        (["B-PER", "B-PER"], [("aa", "PER"), ("bb", "PER")]),
        (["I-PER", "I-PER"], [("aa bb", "PER")]),
        (["B-PER", "I-ORG"], [("aa", "PER"), ("bb", "ORG")]),
        (["MISC", "MISC"], [("aa bb", "MISC")]),
        (["O", "O"], []),
        (["O", "I-PER"], [("bb", "PER")]),
    ],
)
def test_a_new_beginning_or_another_kind_begins_a_new_span(labels: list[str], expected: list[tuple[str, str]]) -> None:
    assert spans_of("aa bb", [("aa", [labels[0]]), ("bb", [labels[1]])]) == expected


def test_the_first_token_of_a_word_decides_for_all_of_it() -> None:
    assert spans_of("Washington slept", [("Washington", ["B-PER", "B-ORG", "O"]), ("slept", ["O", "B-ORG"])]) == [
        ("Washington", "PER")
    ]


def test_only_what_is_wanted_and_sure_enough_is_found() -> None:
    words = [("Ada", ["B-PER"]), ("Acme", ["B-ORG"])]

    assert spans_of("Ada Acme", words, wanted=("ORG",)) == [("Acme", "ORG")]
    assert spans_of("Ada Acme", words, score_min=0.9999) == []


def test_the_kinds_are_what_spans_can_be() -> None:
    assert outcomes.kinds(LABELS) == ["PER", "ORG", "MISC"]


def test_a_text_of_special_tokens_only_has_no_spans() -> None:
    assert spans_of("", []) == []


def test_a_spans_score_is_the_mean_of_its_words() -> None:
    logits = np.concatenate([logits_of("B-PER", sure=2.0), logits_of("I-PER", sure=1.0)])
    (span,) = outcomes.spans(
        logits, offsets=np.array([[0, 1], [2, 3]], np.int32), words=np.array([0, 1], np.int32), labels=LABELS
    )

    expected = np.mean([np.exp(sure) / (np.exp(sure) + 5) for sure in (2.0, 1.0)])
    assert (span.start, span.end, span.label) == (0, 3, "PER")
    assert span.score == pytest.approx(expected)


numbers = st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3)


@settings(deadline=None, max_examples=60)
@given(st.lists(numbers, min_size=1, max_size=5))
def test_probabilities_are_probabilities_at_any_size_of_logit(rows: list[list[float]]) -> None:
    logits = np.array(rows, dtype=np.float32)

    softmax = outcomes.probabilities(logits, activation="softmax")
    sigmoid = outcomes.probabilities(logits, activation="sigmoid")

    assert np.allclose(softmax.sum(axis=1), 1.0, atol=1e-5)
    for found in (softmax, sigmoid):
        assert np.isfinite(found).all()
        assert ((found >= 0) & (found <= 1)).all()
    # The order stays; what differs by less than a float can tell may tie.
    assert (softmax.max(axis=1) == softmax[np.arange(len(rows)), logits.argmax(axis=1)]).all()


def test_relevance_is_the_sigmoid_of_one_logit_or_the_last_of_several_labels() -> None:
    one = outcomes.relevance(np.array([[0.0], [2.0], [-2.0]], dtype=np.float32))
    two = outcomes.relevance(np.array([[1.0, 1.0], [0.0, 3.0]], dtype=np.float32))

    assert one == pytest.approx([0.5, 0.880797, 0.119203], abs=1e-5)
    assert two == pytest.approx([0.5, 0.952574], abs=1e-5)
