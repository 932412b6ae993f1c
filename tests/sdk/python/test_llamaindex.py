"""LlamaIndex' OpenAI embeddings: batches of 100 strings, newlines made spaces."""

from llama_index.core import Document, VectorStoreIndex
from llama_index.embeddings.openai import OpenAIEmbedding

from tests.sdk.python.appliance_facts import (
    ALIAS,
    ANSWER,
    BASE_URL,
    DOCUMENTS,
    QUESTION,
    TEXTS,
    as_vectors,
    worst_cosine,
)


async def test_batches_queries_and_asynchronous_calls() -> None:
    embedding = OpenAIEmbedding(model=ALIAS, api_base=BASE_URL)
    texts = [f"text number {index}" for index in range(250)]

    rows = as_vectors(embedding.get_text_embedding_batch(texts), count=250)

    alike = as_vectors(await embedding.aget_text_embedding_batch(texts), count=250)
    assert worst_cosine(rows, alike) > 0.9999
    alone = as_vectors([embedding.get_text_embedding(texts[101]), embedding.get_query_embedding(texts[101])], count=2)
    assert worst_cosine(alone, rows[[101, 101]]) > 0.9999


def test_odd_texts() -> None:
    embedding = OpenAIEmbedding(model=ALIAS, api_base=BASE_URL)
    as_vectors(embedding.get_text_embedding_batch(list(TEXTS)), count=len(TEXTS))


def test_any_served_name_can_be_used() -> None:
    embedding = OpenAIEmbedding(model_name="padded-to-1536", api_base=BASE_URL)
    as_vectors([embedding.get_query_embedding(QUESTION)], count=1, width=1536)


def test_an_index_finds_the_document() -> None:
    embedding = OpenAIEmbedding(model=ALIAS, api_base=BASE_URL)
    index = VectorStoreIndex.from_documents([Document(text=text) for text in DOCUMENTS], embed_model=embedding)

    (found,) = index.as_retriever(similarity_top_k=1).retrieve(QUESTION)

    assert found.get_content() == DOCUMENTS[ANSWER]
