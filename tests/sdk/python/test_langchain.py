"""LangChain's OpenAI embeddings with all defaults: they send token arrays, in batches, and average long texts."""

import pytest
from langchain_core.documents import Document
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings
from openai import BadRequestError, OpenAI

from tests.sdk.python.appliance_facts import (
    ALIAS,
    ANSWER,
    DOCUMENTS,
    MODEL,
    QUESTION,
    TEXTS,
    Vectors,
    as_vectors,
    worst_cosine,
)


def of_texts(texts: list[str]) -> Vectors:
    """What the appliance answers to the texts themselves."""
    with OpenAI() as client:
        answer = client.embeddings.create(model=MODEL, input=texts)
    return as_vectors([row.embedding for row in answer.data], count=len(texts))


@pytest.mark.parametrize("model", [ALIAS, MODEL, "text-embedding-ada-002"])
def test_documents_sent_as_tokens_equal_their_texts(model: str) -> None:
    embeddings = OpenAIEmbeddings(model=model)

    rows = as_vectors(embeddings.embed_documents(list(TEXTS)), count=len(TEXTS))

    assert worst_cosine(rows, of_texts(list(TEXTS))) > 0.9999
    query = as_vectors([embeddings.embed_query(TEXTS[2])], count=1)
    assert worst_cosine(query, rows[2:3]) > 0.9999


async def test_the_asynchronous_calls_answer_alike() -> None:
    embeddings = OpenAIEmbeddings(model=ALIAS)
    rows = as_vectors(await embeddings.aembed_documents(list(TEXTS)), count=len(TEXTS))
    assert worst_cosine(rows, of_texts(list(TEXTS))) > 0.9999


def test_texts_can_be_sent_as_they_are() -> None:
    embeddings = OpenAIEmbeddings(model=ALIAS, check_embedding_ctx_length=False)
    rows = as_vectors(embeddings.embed_documents(list(TEXTS)), count=len(TEXTS))
    assert worst_cosine(rows, of_texts(list(TEXTS))) > 0.9999


def test_more_texts_than_one_request_takes_keep_their_order() -> None:
    texts = [f"text number {index}" for index in range(1500)]
    rows = as_vectors(OpenAIEmbeddings(model=ALIAS).embed_documents(texts), count=1500)
    assert worst_cosine(rows[[0, 999, 1000, 1499]], of_texts([texts[at] for at in (0, 999, 1000, 1499)])) > 0.9999


def test_a_text_longer_than_openai_takes_is_averaged_by_the_client() -> None:
    as_vectors([OpenAIEmbeddings(model=ALIAS).embed_query("word " * 9000)], count=1)


def test_an_empty_document_is_the_same_error_as_openais() -> None:
    with pytest.raises(BadRequestError) as caught:
        OpenAIEmbeddings(model=ALIAS).embed_documents([""])
    assert str(caught.value.param).startswith("input")


def test_a_vector_store_finds_the_document() -> None:
    store = InMemoryVectorStore(OpenAIEmbeddings(model=ALIAS))
    store.add_documents([Document(page_content=text) for text in DOCUMENTS])

    ((found, score),) = store.similarity_search_with_score(QUESTION, k=1)

    assert found.page_content == DOCUMENTS[ANSWER]
    assert 0.5 < score <= 1.0
