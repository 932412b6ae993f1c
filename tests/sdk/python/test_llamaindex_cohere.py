"""LlamaIndex' Cohere embeddings, which know Cohere's model names only, and its reranker."""

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.cohere import CohereEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank

from tests.sdk.python.appliance_facts import (
    ANSWER,
    DOCUMENTS,
    EMBED,
    KEY,
    QUESTION,
    RERANK,
    URL,
    as_vectors,
    worst_cosine,
)


async def test_embeddings() -> None:
    embedding = CohereEmbedding(api_key=KEY, base_url=URL, model_name=EMBED)

    rows = as_vectors(embedding.get_text_embedding_batch(list(DOCUMENTS)), count=len(DOCUMENTS))

    alike = as_vectors(await embedding.aget_text_embedding_batch(list(DOCUMENTS)), count=len(DOCUMENTS))
    assert worst_cosine(rows, alike) > 0.9999
    query = as_vectors([embedding.get_query_embedding(QUESTION)], count=1)
    assert int((rows @ query[0]).argmax()) == ANSWER


def test_rerank() -> None:
    reranker = CohereRerank(api_key=KEY, base_url=URL, model=RERANK, top_n=2)
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in DOCUMENTS]

    ranked = reranker.postprocess_nodes(nodes, query_str=QUESTION)

    assert len(ranked) == 2
    assert ranked[0].node.get_content() == DOCUMENTS[ANSWER]
    assert 0 <= ranked[1].score <= ranked[0].score <= 1
