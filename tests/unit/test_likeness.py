"""How like texts are by their vectors, and what a rerank asks of a model that embeds."""

from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import InvalidRequest, TooLong
from appliance.jobs import Job, Rerank, Scores
from appliance.presets import Facts
from appliance.workers import likeness, rerank_reading
from appliance.workers.prompts import ModelPrompts
from appliance.workers.read_job import QUERY, Reading
from appliance.workers.reading import Reader
from appliance.workers.vector_space import VectorSpace
from appliance.workers.wire import Loaded
from tests.node_parts import word_tokenizer

WORDS = tuple(f"w{number}" for number in range(1, 100))  # the text `w7` is the one token 7
WIDTH = 4
TOKENS_MAX = 4
NONE = ModelPrompts()
RerankBy = Literal["similarity", "maxsim"]
PROMPTS = ModelPrompts(query="w90 ", document="w91 w92 ")


def unit(*rows: list[float]) -> likeness.Rows:
    found = np.array(rows, dtype="<f4")
    result: likeness.Rows = found / np.linalg.norm(found, axis=1, keepdims=True)
    return result


def reading_of(task: Rerank, *, rerank_by: RerankBy = "similarity", prompts: ModelPrompts = NONE) -> Reading:
    facts = Facts("m", tasks=("embed", "rerank"), rerank_by=rerank_by)
    card = Loaded("m", WIDTH, TOKENS_MAX, "float32", 0, 0.0, has_token_vectors=True)
    reader = Reader(word_tokenizer(WORDS, tokens_max=TOKENS_MAX), facts, card, VectorSpace("m", "rev", "mean", prompts))
    return reader.read(Job("j", "m", task, "r", 1.0, first_index=10))


def scores_of(reading: Reading, *items: likeness.Rows) -> list[float]:
    (part,) = reading.answer([memoryview(rows.tobytes()) for rows in items], items[0].shape[1], 1024)
    assert isinstance(part, Scores)
    return [float(score) for score in np.frombuffer(part.data, dtype="<f4")]


def test_the_cosine_of_the_query_with_each_document() -> None:
    found = likeness.similarity(unit([1, 0]), unit([1, 0], [0, 1], [-1, 0], [1, 1]))

    assert found.tolist() == pytest.approx([1, 0, -1, 0.5**0.5])


def test_each_token_of_the_query_finds_its_closest_in_the_document() -> None:
    query = unit([1, 0, 0], [0, 1, 0])

    found = likeness.maxsim(query, [unit([0, 1, 0], [1, 0, 0]), unit([1, 0, 0]), unit([0, 0, 1])])

    assert found.tolist() == pytest.approx([1, 0.5, 0])


@given(st.lists(st.floats(-1.0000004768371582, 1.0000004768371582, width=32), min_size=1, max_size=20))
def test_relevance_keeps_the_order_and_lies_between_0_and_1(values: list[float]) -> None:
    found = likeness.relevance(np.array(values, dtype=np.float64))

    assert ((found >= 0) & (found <= 1)).all()
    for one, own in zip(values, found, strict=True):
        for other, its in zip(values, found, strict=True):
            if one < other:
                assert own <= its


def test_the_query_is_an_item_beside_the_documents() -> None:
    reading = reading_of(Rerank("w1", ("w2 w3", "w4")))

    assert reading.owners == (QUERY, 0, 1)
    assert [item.count for item in reading.items] == [1, 2, 1]
    assert {item.rows for item in reading.items} == {"one"}
    assert scores_of(reading, unit([1, 0]), unit([0, 1]), unit([1, 0])) == pytest.approx([0.5, 1.0])


def test_the_vectors_of_all_tokens_are_asked_for_where_they_are_compared() -> None:
    reading = reading_of(Rerank("w1", ("w2 w3", "w4")), rerank_by="maxsim")

    assert {item.rows for item in reading.items} == {"per_token"}
    assert scores_of(reading, unit([1, 0]), unit([0, 1], [1, 0]), unit([0, 1])) == pytest.approx([1.0, 0.5])


def test_query_and_documents_have_their_prompts() -> None:
    reading = reading_of(Rerank("w1", ("w2",)), prompts=PROMPTS)

    assert [np.frombuffer(item.ids, dtype="<i4").tolist() for item in reading.items] == [[90, 1], [91, 92, 2]]


def test_documents_that_are_cut_are_marked_and_so_are_those_cut_by_the_request() -> None:
    long = Rerank("w1 w2 w3 w4 w5", ("w1 w2 w3 w4 w5", "w1 w2 w3", "w1"))
    assert [item.is_truncated for item in reading_of(long).items] == [True, True, False, False]

    limited = Rerank("w1", ("w1 w2 w3", "w1 w2"), document_tokens_max=2)
    reading = reading_of(limited)
    assert [(item.count, item.is_truncated) for item in reading.items] == [(1, False), (2, True), (2, False)]


@pytest.mark.parametrize(
    ("task", "param"),
    [
        (Rerank("w1 w2 w3 w4 w5", ("w1",), truncation="none"), "query"),
        (Rerank("w1", ("w1", "w1 w2 w3 w4 w5"), truncation="none"), "documents[11]"),
    ],
)
def test_a_text_that_is_too_long_is_named(task: Rerank, param: str) -> None:
    with pytest.raises(TooLong) as refusal:
        reading_of(task)

    assert refusal.value.param == param


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        reading_of(Rerank("", ("w1",)))

    assert refusal.value.param == "query"


def test_token_vectors_of_many_documents_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rerank_reading, "TOKEN_VECTORS_BYTES_MAX", 4 * WIDTH * 3)
    reading_of(Rerank("w1", ("w1", "w2")), rerank_by="maxsim")

    with pytest.raises(InvalidRequest) as refusal:
        reading_of(Rerank("w1", ("w1", "w2 w3")), rerank_by="maxsim")
    assert refusal.value.param == "documents"
