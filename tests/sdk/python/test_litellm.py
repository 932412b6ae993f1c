"""LiteLLM, which speaks each vendor's dialect by itself."""

import asyncio
from typing import Any

import litellm
import pytest

from tests.sdk.python.appliance_facts import (
    ALIAS,
    ANSWER,
    BASE_URL,
    CALLERS,
    DOCUMENTS,
    EMBED,
    KEY,
    QUESTION,
    RERANK,
    TEXTS,
    URL,
    as_vectors,
    worst_cosine,
)


def rows_of(answer: Any, *, count: int) -> Any:
    return as_vectors([row["embedding"] for row in answer.data], count=count)


@pytest.mark.parametrize(
    ("model", "api_base"),
    [
        (f"cohere/{EMBED}", f"{URL}/v1/embed"),
        (f"jina_ai/{ALIAS}", BASE_URL),
        (f"voyage/{ALIAS}", BASE_URL),
        (f"hosted_vllm/{ALIAS}", BASE_URL),
    ],
)
def test_embeddings_in_every_dialect_are_alike(model: str, api_base: str) -> None:
    openai = litellm.embedding(model=f"openai/{ALIAS}", input=list(TEXTS), api_base=BASE_URL, api_key=KEY)
    other = litellm.embedding(model=model, input=list(TEXTS), api_base=api_base, api_key=KEY)

    assert openai.usage.prompt_tokens == openai.usage.total_tokens > 0
    assert other.usage.total_tokens > 0
    assert worst_cosine(rows_of(openai, count=len(TEXTS)), rows_of(other, count=len(TEXTS))) > 0.9999


async def test_many_callers_each_get_their_own_answer() -> None:
    texts = [f"the answer to caller {index}" for index in range(CALLERS)]

    async def embed(some: list[str]) -> Any:
        return await litellm.aembedding(model=f"openai/{ALIAS}", input=some, api_base=BASE_URL, api_key=KEY)

    alone = await asyncio.gather(*(embed([text]) for text in texts))

    rows = as_vectors([answer.data[0]["embedding"] for answer in alone], count=CALLERS)
    assert worst_cosine(rows, rows_of(await embed(texts), count=CALLERS)) > 0.9999


@pytest.mark.parametrize("vendor", ["cohere", "jina_ai", "hosted_vllm", "voyage"])
def test_rerank(vendor: str) -> None:
    answer = litellm.rerank(
        model=f"{vendor}/{RERANK}",
        query=QUESTION,
        documents=list(DOCUMENTS),
        top_n=2,
        return_documents=True,
        api_base=URL,
        api_key=KEY,
    )

    assert answer.results[0]["index"] == ANSWER
    assert len(answer.results) == 2
    assert all(0 <= result["relevance_score"] <= 1 for result in answer.results)
    assert answer.results[0]["document"]["text"] == DOCUMENTS[ANSWER]


def test_errors_are_classes_of_their_own() -> None:
    with pytest.raises(litellm.BadRequestError):
        litellm.embedding(model=f"openai/{ALIAS}", input=[""], api_base=BASE_URL, api_key=KEY)
    with pytest.raises(litellm.AuthenticationError):
        litellm.embedding(model=f"openai/{ALIAS}", input=["x"], api_base=BASE_URL, api_key="sk-wrong")
    with pytest.raises(litellm.NotFoundError):
        litellm.embedding(model="openai/nobody/knows-it", input=["x"], api_base=BASE_URL, api_key=KEY)
