"""Haystack's Cohere embedders and ranker."""

from haystack import Document
from haystack_integrations.components.embedders.cohere import CohereDocumentEmbedder, CohereTextEmbedder
from haystack_integrations.components.rankers.cohere import CohereRanker

from tests.sdk.python.appliance_facts import ANSWER, DOCUMENTS, QUESTION, RERANK, URL, as_vectors


def test_embedders() -> None:
    answer = CohereDocumentEmbedder(api_base_url=URL, progress_bar=False).run(
        [Document(content=content) for content in DOCUMENTS]
    )
    one = CohereTextEmbedder(api_base_url=URL).run(QUESTION)

    rows = as_vectors([document.embedding for document in answer["documents"]], count=len(DOCUMENTS))
    query = as_vectors([one["embedding"]], count=1)
    assert int((rows @ query[0]).argmax()) == ANSWER


def test_ranker() -> None:
    ranker = CohereRanker(model=RERANK, api_base_url=URL, top_k=2)

    ranked = ranker.run(QUESTION, [Document(content=content) for content in DOCUMENTS])["documents"]

    assert len(ranked) == 2
    assert ranked[0].content == DOCUMENTS[ANSWER]
    assert 0 <= ranked[1].score <= ranked[0].score <= 1
