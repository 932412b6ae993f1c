"""Cohere's Python clients of both API versions, synchronous and not; the 5.x and 7.x lines are both in use."""

import asyncio
import base64
from collections.abc import Iterator
from typing import Any

import cohere
import numpy as np
import pytest
from cohere.base_client import BaseCohere
from cohere.core.api_error import ApiError
from cohere.errors import BadRequestError, NotFoundError, ServiceUnavailableError, UnauthorizedError

from tests.sdk.python.appliance_facts import (
    ANSWER,
    CALLERS,
    CROWDED_URL,
    DOCUMENTS,
    EMBED,
    MODEL,
    QUESTION,
    RERANK,
    TEXTS,
    URL,
    WIDTH,
    as_vectors,
    crowd,
    refusals,
    worst_cosine,
)

TYPES = ("float", "int8", "uint8", "binary", "ubinary", "base64")
EXAMPLES = [
    ("I love this, it is wonderful", "positive"),
    ("What a delightful surprise", "positive"),
    ("This is awful and I hate it", "negative"),
    ("A terrible, broken disappointment", "negative"),
]


@pytest.fixture
def v1() -> Iterator[cohere.Client]:
    """Knows the appliance by CO_API_URL and CO_API_KEY alone."""
    with cohere.Client() as client:
        yield client


@pytest.fixture
def v2() -> Iterator[cohere.ClientV2]:
    with cohere.ClientV2() as client:
        yield client


@pytest.fixture
def crowded() -> Iterator[cohere.ClientV2]:
    with cohere.ClientV2(base_url=CROWDED_URL) as client:
        yield client


def test_v1_embeds_without_types(v1: cohere.Client) -> None:
    answer = v1.embed(texts=list(TEXTS), model=EMBED, input_type="search_document")

    assert answer.response_type == "embeddings_floats"
    assert answer.texts == list(TEXTS)
    assert answer.meta.billed_units.input_tokens > 0
    together = as_vectors(answer.embeddings, count=len(TEXTS))
    alone = [v1.embed(texts=[text], model=EMBED, input_type="search_document").embeddings[0] for text in TEXTS]
    assert worst_cosine(together, as_vectors(alone, count=len(TEXTS))) > 0.9999


def test_v1_merges_what_it_sends_in_batches_of_96(v1: cohere.Client) -> None:
    texts = [f"text number {index}" for index in range(250)]

    floats = v1.embed(texts=texts, model=EMBED, input_type="clustering")
    by_type = v1.embed(texts=texts, model=EMBED, input_type="clustering", embedding_types=["float", "int8"])

    assert floats.texts == by_type.texts == texts
    assert floats.meta.billed_units.input_tokens == by_type.meta.billed_units.input_tokens
    merged = as_vectors(floats.embeddings, count=250)
    assert worst_cosine(merged, as_vectors(by_type.embeddings.float_, count=250)) > 0.9999
    assert np.shape(by_type.embeddings.int8) == (250, WIDTH)
    alone = v1.embed(texts=[texts[97]], model=EMBED, input_type="clustering").embeddings
    assert worst_cosine(merged[97:98], as_vectors(alone, count=1)) > 0.9999


def test_v2_embeds_as_every_type(v2: cohere.ClientV2) -> None:
    answer = v2.embed(texts=list(TEXTS), model=EMBED, input_type="search_document", embedding_types=list(TYPES))

    assert answer.meta.billed_units.input_tokens > 0
    found = answer.embeddings
    floats = as_vectors(found.float_, count=len(TEXTS))
    of_base64 = np.stack([np.frombuffer(base64.b64decode(row), dtype="<f4") for row in found.base64])
    assert np.allclose(of_base64, floats, atol=1e-6)
    signed, unsigned = np.array(found.int8), np.array(found.uint8)
    assert signed.shape == unsigned.shape == floats.shape
    assert signed.min() >= -128
    assert signed.max() <= 127
    assert unsigned.min() >= 0
    assert unsigned.max() <= 255
    assert np.array_equal(signed + 128, unsigned)
    bits = np.array(found.ubinary)
    assert bits.shape == (len(TEXTS), WIDTH // 8)
    assert np.array_equal(np.array(found.binary), bits - 128)
    assert np.array_equal(np.unpackbits(bits.astype(np.uint8), axis=1), floats > 0)


def test_int8_vectors_compare_as_floats_do(v2: cohere.ClientV2) -> None:
    texts = [QUESTION, *DOCUMENTS]
    found = v2.embed(texts=texts, model=EMBED, input_type="clustering", embedding_types=["float", "int8"]).embeddings
    floats = as_vectors(found.float_, count=len(texts))
    integers = np.array(found.int8, dtype=np.float64)
    integers /= np.linalg.norm(integers, axis=1, keepdims=True)

    assert np.allclose(integers @ integers.T, floats @ floats.T, atol=0.05)


def test_v2_answers_only_the_types_asked_for(v2: cohere.ClientV2) -> None:
    answer = v2.embed(texts=["x"], model=EMBED, input_type="search_query", embedding_types=["ubinary"])

    assert answer.embeddings.float_ is None
    assert answer.embeddings.int8 is None
    assert np.shape(answer.embeddings.ubinary) == (1, WIDTH // 8)


def test_v2_takes_inputs_of_parts(v2: cohere.ClientV2) -> None:
    parts: list[Any] = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]

    of_parts = v2.embed(inputs=parts, model=EMBED, input_type="search_document", embedding_types=["float"])

    of_texts = v2.embed(texts=list(TEXTS), model=EMBED, input_type="search_document", embedding_types=["float"])
    left, right = (as_vectors(answer.embeddings.float_, count=len(TEXTS)) for answer in (of_parts, of_texts))
    assert worst_cosine(left, right) > 0.9999


def test_truncation_is_the_clients_choice(v2: cohere.ClientV2) -> None:
    long = "first " * 500 + "last " * 500

    def cut(truncate: str, text: str = long) -> Any:
        answer = v2.embed(
            texts=[text], model=EMBED, input_type="clustering", embedding_types=["float"], truncate=truncate
        )
        return as_vectors(answer.embeddings.float_, count=1)

    assert worst_cosine(cut("END"), cut("END", "first " * 500)) > 0.9999
    assert worst_cosine(cut("START"), cut("END", "last " * 500)) > 0.9999
    with pytest.raises(BadRequestError):
        cut("NONE")


async def test_the_asynchronous_clients_answer_alike() -> None:
    async with cohere.AsyncClient() as v1, cohere.AsyncClientV2() as v2:
        floats = await v1.embed(texts=list(TEXTS), model=EMBED, input_type="search_document")
        answer = await v2.embed(texts=list(TEXTS), model=EMBED, input_type="search_document", embedding_types=["float"])
        ranked = await v2.rerank(model=RERANK, query=QUESTION, documents=list(DOCUMENTS))

    left = as_vectors(floats.embeddings, count=len(TEXTS))
    assert worst_cosine(left, as_vectors(answer.embeddings.float_, count=len(TEXTS))) > 0.9999
    assert ranked.results[0].index == ANSWER


async def test_many_callers_each_get_their_own_answer() -> None:
    texts = [f"the answer to caller {index}" for index in range(CALLERS)]

    async with cohere.AsyncClientV2() as client:

        async def embed(some: list[str]) -> Any:
            answer = await client.embed(texts=some, model=EMBED, input_type="clustering", embedding_types=["float"])
            return answer.embeddings.float_

        rows = [row for answer in await asyncio.gather(*(embed([text]) for text in texts)) for row in answer]
        together = await embed(texts)

    assert worst_cosine(as_vectors(rows, count=CALLERS), as_vectors(together, count=CALLERS)) > 0.9999


def test_v1_reranks_texts_and_fields(v1: cohere.Client) -> None:
    texts = v1.rerank(model=RERANK, query=QUESTION, documents=list(DOCUMENTS), return_documents=True)
    fields: list[Any] = [{"title": f"No. {index}", "body": text} for index, text in enumerate(DOCUMENTS)]
    ranked = v1.rerank(model=RERANK, query=QUESTION, documents=fields, rank_fields=["title", "body"], top_n=1)

    scores = [result.relevance_score for result in texts.results]
    assert sorted(result.index for result in texts.results) == [0, 1, 2]
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)
    assert texts.results[0].index == ANSWER
    assert texts.results[0].document.text == DOCUMENTS[ANSWER]
    assert texts.meta.billed_units.search_units == 1
    assert [result.index for result in ranked.results] == [ANSWER]
    assert ranked.results[0].document is None


def test_v2_reranks(v2: cohere.ClientV2) -> None:
    answer = v2.rerank(model=RERANK, query=QUESTION, documents=list(DOCUMENTS), top_n=2, max_tokens_per_doc=100)

    assert answer.results[0].index == ANSWER
    assert len(answer.results) == 2
    more = v2.rerank(model=RERANK, query=QUESTION, documents=list(DOCUMENTS), top_n=10)
    assert len(more.results) == len(DOCUMENTS)
    assert answer.meta.billed_units.search_units == 1


def test_classify_learns_from_examples(v1: cohere.Client) -> None:
    examples = [cohere.ClassifyExample(text=text, label=label) for text, label in EXAMPLES]

    answer = v1.classify(
        model=EMBED, inputs=["absolutely lovely, a wonderful thing", "I hate this awful thing"], examples=examples
    )

    assert [one.prediction for one in answer.classifications] == ["positive", "negative"]
    for one in answer.classifications:
        assert set(one.labels) == {"positive", "negative"}
        assert one.confidence == pytest.approx(max(label.confidence for label in one.labels.values()))


@pytest.mark.parametrize("is_offline", [False, True])
def test_tokens_come_and_go(v1: cohere.Client, is_offline: bool) -> None:
    """Without a tokenizer to download the client's own default, offline, falls back to the API."""
    tokens = v1.tokenize(text="hello tokenized world", model=EMBED, offline=is_offline)
    text = v1.detokenize(tokens=tokens.tokens, model=EMBED, offline=is_offline)

    assert len(tokens.tokens) == len(tokens.token_strings) >= 3
    assert text.text == "hello tokenized world"


def test_the_key_is_checked(v1: cohere.Client) -> None:
    """The clients hide the call they once had; their base class has it still."""
    assert BaseCohere.check_api_key(v1).valid


def test_models_are_listed_by_endpoint_and_found(v2: cohere.ClientV2) -> None:
    by_endpoint = {
        endpoint: {model.name for model in v2.models.list(endpoint=endpoint).models} for endpoint in ("embed", "rerank")
    }

    assert {MODEL, EMBED} <= by_endpoint["embed"]
    assert RERANK in by_endpoint["rerank"]
    found = v2.models.get(MODEL)
    assert found.name == MODEL
    assert "embed" in found.endpoints
    assert found.tokenizer_url is None


def test_bad_input_is_a_bad_request(v1: cohere.Client, v2: cohere.ClientV2) -> None:
    with pytest.raises(BadRequestError) as texts:
        v2.embed(texts=[""], model=EMBED, input_type="clustering", embedding_types=["float"])
    with pytest.raises(BadRequestError) as kind:
        v1.embed(texts=["x"], model=EMBED, input_type="clustering", embedding_types=["float64"])
    with pytest.raises(BadRequestError) as query:
        v2.rerank(model=RERANK, query="", documents=list(DOCUMENTS))
    with pytest.raises(BadRequestError) as documents:
        v1.rerank(model=RERANK, query="x", documents=[])
    with pytest.raises(BadRequestError) as top_n:
        v2.rerank(model=RERANK, query="x", documents=["y"], top_n=0)

    for caught, field in (
        (texts, "texts[0]"),
        (kind, "embedding_types"),
        (query, "query"),
        (documents, "documents"),
        (top_n, "top_n"),
    ):
        assert field in caught.value.body["message"]


def test_a_wrong_key_is_unauthorized() -> None:
    with cohere.ClientV2(api_key="sk-wrong") as client, pytest.raises(UnauthorizedError) as caught:
        client.embed(texts=["x"], model=EMBED, input_type="clustering", embedding_types=["float"])
    assert caught.value.body["message"]


def test_an_unknown_model_is_not_found(v2: cohere.ClientV2) -> None:
    with pytest.raises(NotFoundError) as rerank:
        v2.rerank(model="nobody/knows-it", query="x", documents=["y"])
    with pytest.raises(NotFoundError):
        v2.models.get("nobody/knows-it")
    assert "nobody/knows-it" in rerank.value.body["message"]


def test_a_body_over_the_limit_is_an_error_with_its_status(crowded: cohere.ClientV2) -> None:
    with pytest.raises(ApiError) as caught:
        crowded.embed(texts=["x" * 2_000_000], model="quick", input_type="clustering", embedding_types=["float"])
    assert caught.value.status_code == 413


def test_overload_is_retried_and_then_raised_or_served(crowded: cohere.ClientV2) -> None:
    def embed(retries_max: int) -> Any:
        return crowded.embed(
            texts=["x"],
            model="quick",
            input_type="clustering",
            embedding_types=["float"],
            request_options={"max_retries": retries_max},
        )

    with crowd():
        before = refusals()
        with pytest.raises(ServiceUnavailableError) as caught:
            embed(1)
        assert refusals() == before + 2
        answer = embed(60)

    assert caught.value.body["message"]
    assert len(answer.embeddings.float_) == 1


def test_a_base_url_with_the_version_in_it_works_too() -> None:
    with cohere.ClientV2(base_url=f"{URL}/v1") as client:
        answer = client.embed(texts=["x"], model=EMBED, input_type="clustering", embedding_types=["float"])
    as_vectors(answer.embeddings.float_, count=1)
