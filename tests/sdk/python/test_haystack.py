"""Haystack's OpenAI embedders."""

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.retrievers.in_memory import InMemoryEmbeddingRetriever
from haystack.document_stores.in_memory import InMemoryDocumentStore

from tests.sdk.python.appliance_facts import (
    ALIAS,
    ANSWER,
    BASE_URL,
    DOCUMENTS,
    QUESTION,
    TEXTS,
    WIDTH,
    as_vectors,
    worst_cosine,
)


def test_texts_and_documents_are_embedded_alike() -> None:
    documents = OpenAIDocumentEmbedder(model=ALIAS, api_base_url=BASE_URL, batch_size=2, progress_bar=False)
    text = OpenAITextEmbedder(model=ALIAS, api_base_url=BASE_URL, dimensions=WIDTH)

    answer = documents.run([Document(content=content) for content in TEXTS])
    one = text.run(TEXTS[3])

    rows = as_vectors([document.embedding for document in answer["documents"]], count=len(TEXTS))
    assert answer["meta"]["usage"]["prompt_tokens"] > 0
    assert worst_cosine(rows[3:4], as_vectors([one["embedding"]], count=1)) > 0.9999


def test_a_retriever_finds_the_document() -> None:
    store = InMemoryDocumentStore(embedding_similarity_function="cosine")
    embedder = OpenAIDocumentEmbedder(model=ALIAS, api_base_url=BASE_URL, progress_bar=False)
    store.write_documents(embedder.run([Document(content=content) for content in DOCUMENTS])["documents"])
    query = OpenAITextEmbedder(model=ALIAS, api_base_url=BASE_URL).run(QUESTION)["embedding"]

    (found,) = InMemoryEmbeddingRetriever(store, top_k=1).run(query_embedding=query)["documents"]

    assert found.content == DOCUMENTS[ANSWER]
