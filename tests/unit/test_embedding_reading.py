"""What an embedding asks of a model, and what its numbers become: outputs, widths, lengths, prompts, spaces."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client import REGISTRY

from appliance.errors import ApplianceError, BadVector, InvalidRequest, StartupError, TooLong
from appliance.jobs import (
    Detokenize,
    Embed,
    Job,
    Output,
    Part,
    Rows,
    SparseRows,
    Task,
    Text,
    Tokenize,
    TokenRows,
    Truncation,
)
from appliance.presets import Facts
from appliance.workers import embedding_reading
from appliance.workers.embedding_reading import WINDOWS_MAX
from appliance.workers.prompts import ModelPrompts
from appliance.workers.read_job import Reading
from appliance.workers.reading import Reader
from appliance.workers.vector_space import VectorSpace
from appliance.workers.wire import Loaded
from tests.node_parts import word_tokenizer

WORDS = tuple(f"w{number}" for number in range(1, 100))  # the text `w7` is the one token 7
WIDTH = 4
TOKENS_MAX = 4
PROMPTS = ModelPrompts(query="w90 ", document="w91 w92 ")
NONE = ModelPrompts()


def reader_of(
    *,
    prompts: ModelPrompts = NONE,
    has_token_vectors: bool = True,
    outputs: tuple[Output, ...] = ("dense",),
    matryoshka_widths: tuple[int, ...] = (),
    name: str = "m",
) -> Reader:
    facts = Facts(name, outputs=outputs, matryoshka_widths=matryoshka_widths)
    card = Loaded(name, WIDTH, TOKENS_MAX, "float32", 0, 0.0, has_token_vectors=has_token_vectors)
    space = VectorSpace(name, "rev", "mean", prompts)
    return Reader(word_tokenizer(WORDS, tokens_max=TOKENS_MAX), facts, card, space)


def read(reader: Reader, task: Task, *, first_index: int = 0) -> Reading:
    return reader.read(Job("j", "m", task, "r", 1.0, first_index=first_index))


def texts_of(reading: Reading) -> list[list[int]]:
    return [np.frombuffer(item.ids, dtype="<i4").tolist() for item in reading.items]


def buffer_of(*rows: Sequence[float]) -> memoryview:
    return memoryview(np.array(rows, dtype="<f4").tobytes())


def vectors_of(parts: Sequence[Part]) -> npt.NDArray[np.float32]:
    assert all(isinstance(part, Rows) for part in parts)
    (width,) = {part.width for part in parts if isinstance(part, Rows)}
    data = b"".join(part.data for part in parts if isinstance(part, Rows))
    return np.frombuffer(data, dtype="<f4").reshape(-1, width)


# Outputs


def test_several_outputs_run_each_text_once_for_each_and_count_its_tokens_once() -> None:
    reading = read(reader_of(), Embed(("w1 w2", "w3"), outputs=("multivector", "dense")))

    assert texts_of(reading) == [[1, 2], [3], [1, 2], [3]]
    assert [item.rows for item in reading.items] == ["per_token", "per_token", "one", "one"]
    assert reading.owners == (0, 1, 0, 1)
    assert reading.input_tokens == 3


def test_the_parts_of_several_outputs_come_in_their_order_and_bounded() -> None:
    reading = read(reader_of(), Embed(("w1 w2", "w3", "w4"), outputs=("multivector", "dense")))
    tokens = [buffer_of([1, 0, 0, 0], [2, 0, 0, 0]), buffer_of([3, 0, 0, 0]), buffer_of([4, 0, 0, 0])]
    own = [buffer_of([number, 0, 0, 0]) for number in (10, 20, 30)]

    parts = reading.answer([*tokens, *own], WIDTH, 32)

    assert [type(part) for part in parts] == [TokenRows, TokenRows, Rows, Rows]
    assert [[len(row) // 16 for row in part.inputs] for part in parts if isinstance(part, TokenRows)] == [[2], [1, 1]]
    assert vectors_of(parts[2:])[:, 0].tolist() == [10, 20, 30]


def test_a_sparse_vector_has_its_ids_and_weights_and_may_be_empty() -> None:
    reader = reader_of(outputs=("sparse",), has_token_vectors=False)
    reading = read(reader, Embed(("w1", "w2", "w3"), outputs=("sparse",)))

    parts = reading.answer([buffer_of([3, 0.5], [30000, 1.5]), memoryview(b""), buffer_of([0, 2.0])], 2, 1000)

    assert [item.rows for item in reading.items] == ["any"] * 3
    (part,) = parts
    assert isinstance(part, SparseRows)
    assert [np.frombuffer(row.indices, "<i4").tolist() for row in part.inputs] == [[3, 30000], [], [0]]
    assert [np.frombuffer(row.values, "<f4").tolist() for row in part.inputs] == [[0.5, 1.5], [], [2.0]]
    assert len(reading.answer([buffer_of([3, 0.5])] * 3, 2, 8)) == 3


@pytest.mark.parametrize(
    "rows", [[[3, 1], [2, 1]], [[2, 1], [2, 1]], [[-1, 1]], [[1.5, 1]], [[1, float("nan")]], [[float("inf"), 1]]]
)
def test_what_is_no_sparse_vector_is_never_an_answer(rows: list[list[float]]) -> None:
    reader = reader_of(outputs=("sparse",), has_token_vectors=False)
    reading = read(reader, Embed(("w1", "w2"), outputs=("sparse",)), first_index=8)

    with pytest.raises(BadVector, match="no sparse vector") as caught:
        reading.answer([buffer_of([1, 1]), buffer_of(*rows)], 2, 1000)
    assert caught.value.param == "input[9]"


@pytest.mark.parametrize(
    ("outputs", "has_token_vectors", "asked", "said"),
    [
        (("dense",), False, ("multivector",), "'outputs' names multivector; m gives dense"),
        (("dense",), True, ("sparse", "dense"), "'outputs' names sparse; m gives dense, multivector"),
        (("sparse",), False, ("dense",), "'outputs' names dense; m gives sparse"),
        (("multivector",), True, ("dense",), "'outputs' names dense; m gives multivector"),
        (("dense",), True, (), "'outputs' names nothing"),
    ],
)
def test_an_output_that_the_model_does_not_give_is_refused_with_what_it_gives(
    outputs: tuple[Output, ...], has_token_vectors: bool, asked: tuple[Output, ...], said: str
) -> None:
    reader = reader_of(outputs=outputs, has_token_vectors=has_token_vectors)

    with pytest.raises(InvalidRequest, match=said) as caught:
        read(reader, Embed(("w1",), outputs=asked))
    assert caught.value.param == "outputs"


def test_facts_that_the_model_does_not_bear_out_stop_the_start() -> None:
    with pytest.raises(StartupError, match="no vectors of tokens"):
        reader_of(outputs=("dense", "multivector"), has_token_vectors=False)
    with pytest.raises(StartupError, match="Matryoshka width 5; the model gives 4"):
        reader_of(matryoshka_widths=(2, 5))


@pytest.mark.parametrize("truncation", ["end", "chunk_mean"])
def test_nothing_is_no_input(truncation: Truncation) -> None:
    with pytest.raises(InvalidRequest, match="no input"):
        read(reader_of(), Embed((), truncation=truncation))


def test_token_vectors_that_no_node_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedding_reading, "TOKEN_VECTORS_BYTES_MAX", 3 * 4 * WIDTH)

    assert read(reader_of(), Embed(("w1 w2", "w3"), outputs=("multivector",))).items
    with pytest.raises(InvalidRequest, match="send fewer inputs") as caught:
        read(reader_of(), Embed(("w1 w2", "w3 w4"), outputs=("multivector",)))
    assert caught.value.param == "input"
    assert read(reader_of(), Embed(("w1 w2", "w3 w4"))).items


# Widths


def test_a_vector_is_cut_and_normalized_again() -> None:
    reading = read(reader_of(matryoshka_widths=(2, 3)), Embed(("w1", "w2"), width=2))

    vectors = vectors_of(reading.answer([buffer_of([0.6, 0.0, 0.8, 0.0]), buffer_of([0.3, 0.4, 0.5, 0.7])], WIDTH, 8))

    np.testing.assert_allclose(vectors, [[1.0, 0.0], [0.6, 0.8]], atol=1e-6)


def test_the_models_own_width_changes_nothing() -> None:
    row = [0.1, 0.2, 0.3, 0.4]
    reading = read(reader_of(), Embed(("w1",), width=WIDTH))

    assert vectors_of(reading.answer([buffer_of(row)], WIDTH, 100)).tobytes() == bytes(buffer_of(row))


def test_a_vector_of_which_nothing_is_left_is_never_an_answer() -> None:
    reading = read(reader_of(matryoshka_widths=(2,)), Embed(("w1", "w2"), width=2), first_index=4)

    with pytest.raises(BadVector, match="within 2 dimensions") as caught:
        reading.answer([buffer_of([1, 0, 0, 0]), buffer_of([0, 0, 1, 0])], WIDTH, 100)
    assert caught.value.param == "input[5]"


@pytest.mark.parametrize(
    ("trained", "width", "said"),
    [
        ((), 3, "must not be cut; send 4 or leave"),
        ((), 5, "must not be cut; send 4 or leave 'dimensions' out; for wider vectors ask for an alias with `pad_to`"),
        ((3, 2), 1, "can be cut to 2 and more, and was trained for 2, 3"),
        ((3, 2), 5, "for wider vectors ask for an alias with `pad_to`"),
    ],
)
def test_another_width_is_refused_with_what_to_use(trained: tuple[int, ...], width: int, said: str) -> None:
    with pytest.raises(InvalidRequest, match=f"'dimensions' is {width}, m gives 4 and .*{said}") as caught:
        read(reader_of(matryoshka_widths=trained), Embed(("w1",), width=width))
    assert caught.value.param == "dimensions"


@pytest.mark.parametrize("width", [2, 3, 4])
def test_every_width_from_the_smallest_trained_one_is_taken(width: int) -> None:
    reading = read(reader_of(matryoshka_widths=(2, 4)), Embed(("w1",), width=width))

    assert vectors_of(reading.answer([buffer_of([0.5] * 4)], WIDTH, 100)).shape == (1, width)


def test_a_width_without_a_dense_output_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="goes with the output 'dense'"):
        read(reader_of(matryoshka_widths=(2,)), Embed(("w1",), width=2, outputs=("multivector",)))


# Lengths


def test_a_long_text_is_the_mean_of_its_pieces_weighted_by_their_tokens() -> None:
    task = Embed(("w1", "w1 w2 w3 w4 w5"), truncation="chunk_mean")
    reading = read(reader_of(), task)
    first, second = [1.0, 0.0, 0.0, 0.0], [0.0, 1.0, 0.0, 0.0]

    vectors = vectors_of(reading.answer([buffer_of(second), buffer_of(first), buffer_of(second)], WIDTH, 100))

    assert texts_of(reading) == [[1], [1, 2, 3, 4], [5]]
    assert reading.owners == (0, 1, 1)
    assert not any(item.is_truncated for item in reading.items)
    assert reading.input_tokens is None  # all of them
    np.testing.assert_allclose(vectors, [second, np.array([4, 1, 0, 0]) / np.sqrt(17)], atol=1e-6)


def test_the_prompt_is_in_every_piece_and_weighs_nothing() -> None:
    task = Embed(("w1 w2 w3 w4",), truncation="chunk_mean", intent="query")
    reading = read(reader_of(prompts=PROMPTS), task)

    assert texts_of(reading) == [[90, 1, 2, 3], [90, 4]]
    vectors = vectors_of(reading.answer([buffer_of([1, 0, 0, 0]), buffer_of([0, 1, 0, 0])], WIDTH, 100))
    np.testing.assert_allclose(vectors, [np.array([3, 1, 0, 0]) / np.sqrt(10)], atol=1e-6)


def test_a_mean_is_cut_like_any_vector() -> None:
    task = Embed(("w1 w2 w3 w4 w5 w6 w7 w8",), truncation="chunk_mean", width=2)
    reading = read(reader_of(matryoshka_widths=(2,)), task)

    vectors = vectors_of(reading.answer([buffer_of([0.6, 0, 0.8, 0]), buffer_of([0, 0.6, 0.8, 0])], WIDTH, 100))

    np.testing.assert_allclose(vectors, [[np.sqrt(0.5), np.sqrt(0.5)]], atol=1e-6)


def test_pieces_that_cancel_each_other_are_never_an_answer() -> None:
    task = Embed(("w1", "w1 w2 w3 w4 w5 w6 w7 w8"), truncation="chunk_mean")
    reading = read(reader_of(), task, first_index=2)
    row = buffer_of([1, 0, 0, 0])

    with pytest.raises(BadVector, match="cancel each other") as caught:
        reading.answer([row, row, buffer_of([-1, 0, 0, 0])], WIDTH, 100)
    assert caught.value.param == "input[3]"


def test_a_text_of_too_many_pieces_is_refused() -> None:
    most = " ".join(["w1"] * TOKENS_MAX * WINDOWS_MAX)

    assert len(read(reader_of(), Embed((most,), truncation="chunk_mean")).items) == WINDOWS_MAX
    with pytest.raises(TooLong, match="split it") as caught:
        read(reader_of(), Embed((f"{most} w1",), truncation="chunk_mean"), first_index=3)
    assert caught.value.param == "input[3]"


def test_only_vectors_of_texts_have_a_mean() -> None:
    with pytest.raises(InvalidRequest, match="only the output 'dense'") as caught:
        read(reader_of(), Embed(("w1",), truncation="chunk_mean", outputs=("dense", "multivector")))
    assert caught.value.param == "outputs"


def test_native_ids_are_read_by_the_same_rules() -> None:
    ids = (np.array([1, 2, 3, 4, 5], dtype="<i4").tobytes(),)
    reader = reader_of(prompts=PROMPTS)

    cut = read(reader, Embed((), ids=ids, intent="query"))
    start = read(reader, Embed((), ids=ids, intent="query", truncation="start"))
    pieces = read(reader, Embed((), ids=ids, intent="query", truncation="chunk_mean"))
    shorter = read(reader, Embed((), ids=ids, tokens_max=2, intent="query"))

    assert texts_of(cut) == [[90, 1, 2, 3]]
    assert texts_of(start) == [[90, 3, 4, 5]]
    assert texts_of(pieces) == [[90, 1, 2, 3], [90, 4, 5]]
    assert texts_of(shorter) == [[90, 1]]
    assert cut.items[0].is_truncated


# Prompts


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (ModelPrompts(), [[1], [1], [1]]),
        (PROMPTS, [[1], [90, 1], [91, 92, 1]]),
        (ModelPrompts("w90 ", "", default=""), [[1], [90, 1], [1]]),
        (ModelPrompts("w90 ", "", default="w90 "), [[90, 1], [90, 1], [1]]),
        (ModelPrompts("", "", default="w93 "), [[93, 1], [1], [1]]),
    ],
)
def test_the_prompt_goes_by_what_the_input_is(prompts: ModelPrompts, expected: list[list[int]]) -> None:
    reader = reader_of(prompts=prompts)

    found = [texts_of(read(reader, Embed(("w1",), intent=intent)))[0] for intent in (None, "query", "document")]

    assert found == expected


def missing_prompts(model: str) -> float:
    return REGISTRY.get_sample_value("appliance_prompt_missing_total", {"model": model}) or 0.0


def test_a_missing_prompt_is_announced_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    reader = reader_of(prompts=PROMPTS, name="counted/model")
    before = missing_prompts("counted/model")

    with caplog.at_level(logging.WARNING):
        read(reader, Embed(("w1", "w2")))
        read(reader, Embed(("w3",)))
        read(reader, Embed(("w1",), intent="document"))

    assert missing_prompts("counted/model") == before + 3
    (record,) = caplog.records
    for what_to_set in ('"input_type"', '"counted/model@query"', '"counted/model@document"', "`intent`"):
        assert what_to_set in record.getMessage()


@pytest.mark.parametrize("prompts", [ModelPrompts(), ModelPrompts("w90 ", "", default="w90 ")])
def test_nothing_is_missing_where_the_model_has_none_or_says_which(
    prompts: ModelPrompts, caplog: pytest.LogCaptureFixture
) -> None:
    read(reader_of(prompts=prompts, name="content/model"), Embed(("w1",)))

    assert not caplog.records
    assert missing_prompts("content/model") == 0


# Spaces


def space_of(prompts: ModelPrompts = NONE, **fields: Any) -> str:  # of an Embed
    reader = reader_of(prompts=prompts, matryoshka_widths=(2,))
    return read(reader, Embed(("w1",), **fields)).space


def test_a_space_is_what_vectors_must_share() -> None:
    assert space_of() == "model=m weights=rev pooling=mean prompts=none width=4"
    assert space_of(width=2) == "model=m weights=rev pooling=mean prompts=none width=2"
    assert space_of(width=4) == space_of()
    assert space_of(intent="query") == space_of()  # of a model without prompts
    assert space_of(truncation="chunk_mean") == space_of(outputs=("dense", "multivector")) == space_of()


def test_queries_and_documents_share_a_space_and_what_has_no_prompt_does_not() -> None:
    query, document, neither = (space_of(PROMPTS, intent=intent) for intent in ("query", "document", None))

    assert query == document
    assert neither == "model=m weights=rev pooling=mean prompts=missing width=4"
    assert query not in {neither, space_of(intent="query")}


def test_every_other_set_of_prompts_is_another_space() -> None:
    sets = [
        ModelPrompts("w90 ", ""),
        ModelPrompts("", "w90 "),
        PROMPTS,
        ModelPrompts("w91 ", ""),
    ]
    defaults = [ModelPrompts(default="w93 "), ModelPrompts(default="w94 ")]

    spaces = [space_of(prompts, intent="document") for prompts in sets] + [space_of(prompts) for prompts in defaults]

    assert len(set(spaces)) == len(spaces)
    assert space_of(ModelPrompts("w90 ", "", default="w90 ")) == spaces[0]


# Tokens and texts


def test_tokens_are_answered_without_a_device() -> None:
    tokenized, joined = (read(reader_of(), task) for task in (Tokenize("w1 w2"), Detokenize((2, 1))))

    assert tokenized.items == joined.items == []
    (part,) = tokenized.answer([], 0, 100)
    assert (part.ids, part.pieces) == ((1, 2), ("w1", "w2"))  # type: ignore[union-attr]  # fails if it is another
    assert joined.answer([], 0, 100) == [Text("w2 w1")]


@pytest.mark.parametrize("task", [Detokenize((1, 100)), Detokenize((-1,))])
def test_ids_out_of_range_are_refused(task: Task) -> None:
    with pytest.raises(ApplianceError, match="no token of the model"):
        read(reader_of(), task)
