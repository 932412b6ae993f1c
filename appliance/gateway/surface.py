"""Everything that is served over HTTP, as one table."""

from dataclasses import replace

import msgspec

from appliance import telemetry
from appliance.compat import cohere_classify, cohere_embed, cohere_tokens, extract, openai_embeddings, rerank
from appliance.compat.cohere_key import CheckKeyAnswer
from appliance.compat.models import ModelList, ModelObject
from appliance.gateway import openapi
from appliance.gateway.calls import Calls
from appliance.gateway.cohere_classify import Classification
from appliance.gateway.cohere_embed import CohereEmbeddings
from appliance.gateway.cohere_tokens import Tokens
from appliance.gateway.embeddings import Embeddings
from appliance.gateway.extract import Extraction
from appliance.gateway.health import Canary, Health
from appliance.gateway.http import Answer, Request
from appliance.gateway.models import Models
from appliance.gateway.operation import Operation
from appliance.gateway.paths import spellings
from appliance.gateway.rerank import Reranking

VECTOR_HEADERS = (
    "x-appliance-ignored",
    "x-appliance-truncated",
    "x-appliance-space",
    "x-appliance-fingerprint",
)


def operations(calls: Calls, canary: Canary) -> tuple[Operation, ...]:
    """The table. Add an endpoint here and nowhere else: its routes, its documentation and its bounds follow."""
    classification = Classification(calls)
    cohere_embeddings = CohereEmbeddings(calls)
    embeddings = Embeddings(calls)
    extraction = Extraction(calls)
    models = Models(calls.catalog)
    reranking = Reranking(calls)
    tokens = Tokens(calls)
    health = Health(canary, calls.catalog.models())
    described = (
        Operation(
            paths=(*spellings("/v1/embeddings"), "/openai/v1/embeddings"),
            name="embeddings",
            summary="Turn texts into vectors",
            serve=embeddings.post,
            body=openai_embeddings.EmbeddingsBody,
            answer=openai_embeddings.EmbeddingsAnswer,
            headers=VECTOR_HEADERS,
        ),
        Operation(
            paths=("/openai/deployments/{name}/embeddings",),
            name="embeddings",
            summary="The same at Azure's path, which names the model",
            serve_named=embeddings.post_deployment,
            body=openai_embeddings.EmbeddingsBody,
            answer=openai_embeddings.EmbeddingsAnswer,
            query=("api-version",),
            headers=VECTOR_HEADERS,
        ),
        Operation(
            paths=spellings("/v1/embed"),
            name="embed",
            summary="Turn texts into vectors, as Cohere's v1 API",
            serve=cohere_embeddings.v1,
            body=cohere_embed.EmbedBody,
            answer=cohere_embed.EmbedAnswer,
            dialect="cohere",
            headers=VECTOR_HEADERS,
        ),
        Operation(
            paths=spellings("/v2/embed"),
            name="embed",
            summary="Turn texts into vectors of one or more types, as Cohere's v2 API",
            serve=cohere_embeddings.v2,
            body=cohere_embed.EmbedBody,
            answer=cohere_embed.EmbedAnswer,
            dialect="cohere",
            headers=VECTOR_HEADERS,
        ),
        Operation(
            paths=spellings("/v1/rerank"),
            name="rerank",
            summary="Order documents by their relevance to a query, as Cohere's v1, Jina's and Voyage's API",
            serve=reranking.v1,
            body=rerank.RerankBody,
            answer=rerank.RerankAnswer,
            dialect="cohere",
            headers=("x-appliance-ignored", "x-appliance-truncated"),
        ),
        Operation(
            paths=spellings("/v2/rerank"),
            name="rerank",
            summary="Order documents by their relevance to a query, as Cohere's v2 API",
            serve=reranking.v2,
            body=rerank.RerankBody,
            answer=rerank.RerankAnswer,
            dialect="cohere",
            headers=("x-appliance-ignored", "x-appliance-truncated"),
        ),
        Operation(
            paths=spellings("/v1/extract"),
            name="extract",
            summary="Find the named entities of texts",
            serve=extraction.post,
            body=extract.ExtractBody,
            answer=extract.ExtractAnswer,
            headers=("x-appliance-ignored", "x-appliance-truncated"),
        ),
        Operation(
            paths=spellings("/v1/classify"),
            name="classify",
            summary="Say which label a text has, by a model with labels or by labelled examples, as Cohere's API",
            serve=classification.post,
            body=cohere_classify.ClassifyBody,
            answer=cohere_classify.ClassifyAnswer,
            dialect="cohere",
            headers=("x-appliance-ignored", "x-appliance-truncated"),
        ),
        Operation(
            paths=spellings("/v1/tokenize"),
            name="tokenize",
            summary="Cut a text into the tokens of a model, as Cohere's API",
            serve=tokens.tokenize,
            body=cohere_tokens.TokenizeBody,
            answer=cohere_tokens.TokenizeAnswer,
            dialect="cohere",
            headers=("x-appliance-ignored",),
        ),
        Operation(
            paths=spellings("/v1/detokenize"),
            name="detokenize",
            summary="Make a text of a model's tokens, as Cohere's API",
            serve=tokens.detokenize,
            body=cohere_tokens.DetokenizeBody,
            answer=cohere_tokens.DetokenizeAnswer,
            dialect="cohere",
            headers=("x-appliance-ignored",),
        ),
        Operation(
            paths=spellings("/v1/check-api-key"),
            name="check-api-key",
            summary="Whether the key is accepted, as Cohere's API",
            serve=tokens.check_key,
            answer=CheckKeyAnswer,
            dialect="cohere",
        ),
        Operation(
            paths=spellings("/v1/models"),
            name="models",
            summary="List the served models and their aliases",
            serve=models.list,
            methods=("GET",),
            answer=ModelList,
            query=("endpoint", "default_only", "page_size", "page_token"),
        ),
        Operation(
            paths=spellings("/v1/models/{name}"),
            name="models",
            summary="One served model or alias; slashes in its name may come raw or percent-encoded",
            serve_named=models.get,
            methods=("GET",),
            answer=ModelObject,
        ),
        Operation(
            paths=("/healthz",),
            name="healthz",
            summary="Whether the process answers",
            serve=health.healthz,
            methods=("GET", "HEAD"),
            is_open=True,
        ),
        Operation(
            paths=("/readyz",),
            name="readyz",
            summary="Whether every served model really answered lately; 503 while one did not",
            serve=health.readyz,
            methods=("GET", "HEAD"),
            statuses=(503,),
            is_open=True,
        ),
        Operation(
            paths=("/metrics",),
            name="metrics",
            summary="Figures in Prometheus' text format",
            serve=metrics,
            methods=("GET",),
            content_type=telemetry.CONTENT_TYPE,
        ),
    )
    # Open: it says what any release says, nothing of this one's models; and tools that read it send no key.
    schema = Operation(
        paths=("/schema", "/schema/openapi.json"),
        name="schema",
        summary="This document",
        methods=("GET",),
        is_open=True,
    )
    document = Document(openapi.document((*described, schema)))
    return (*described, replace(schema, serve=document.get))


class Document:
    """The OpenAPI document, written once."""

    def __init__(self, document: openapi.Json) -> None:
        self._body = msgspec.json.encode(document)

    async def get(self, request: Request) -> Answer:
        """All of it."""
        return Answer(self._body)


async def metrics(request: Request) -> Answer:
    """Prometheus' text format."""
    return Answer(telemetry.exposition(), content_type=telemetry.CONTENT_TYPE)
