"""LangChain's Cohere embeddings and reranker."""

from langchain_cohere import CohereEmbeddings, CohereRerank
from langchain_core.documents import Document

from tests.sdk.python.appliance_facts import (
    ANSWER,
    DOCUMENTS,
    EMBED,
    QUESTION,
    RERANK,
    TEXTS,
    URL,
    as_vectors,
    worst_cosine,
)


async def test_embeddings() -> None:
    embeddings = CohereEmbeddings(model=EMBED, base_url=URL)

    rows = as_vectors(embeddings.embed_documents(list(TEXTS)), count=len(TEXTS))

    alike = as_vectors(await embeddings.aembed_documents(list(TEXTS)), count=len(TEXTS))
    assert worst_cosine(rows, alike) > 0.9999
    query = as_vectors([embeddings.embed_query(QUESTION)], count=1)
    documents = as_vectors(embeddings.embed_documents(list(DOCUMENTS)), count=len(DOCUMENTS))
    assert int((documents @ query[0]).argmax()) == ANSWER


def test_more_texts_than_one_call_takes() -> None:
    texts = [f"text number {index}" for index in range(200)]
    embeddings = CohereEmbeddings(model=EMBED, base_url=URL)
    rows = as_vectors(embeddings.embed_documents(texts), count=200)
    assert worst_cosine(rows[150:151], as_vectors(embeddings.embed_documents([texts[150]]), count=1)) > 0.9999


def test_rerank() -> None:
    reranker = CohereRerank(model=RERANK, base_url=URL, top_n=2)

    ranked = reranker.rerank(list(DOCUMENTS), QUESTION)
    compressed = reranker.compress_documents([Document(page_content=text) for text in DOCUMENTS], QUESTION)

    assert len(ranked) == len(compressed) == 2
    assert ranked[0]["index"] == ANSWER
    assert compressed[0].page_content == DOCUMENTS[ANSWER]
    assert 0 <= compressed[0].metadata["relevance_score"] <= 1
