"""Everything that is served over HTTP, as one table."""

from dataclasses import replace

import msgspec

from appliance import telemetry
from appliance.compat import (
    cohere_chat,
    cohere_chat_v1,
    cohere_chat_v1_answer,
    cohere_classify,
    cohere_embed,
    cohere_tokens,
    decisions,
    extract,
    openai_chat,
    openai_completions,
    openai_embeddings,
    openai_responses,
    rerank,
    sse,
)
from appliance.compat.cohere_chat_answer import CohereChatAnswer
from appliance.compat.cohere_key import CheckKeyAnswer
from appliance.compat.models import ModelList, ModelObject
from appliance.compat.openai_chat_answer import ChatAnswer
from appliance.compat.responses_answer import Response
from appliance.gateway import openapi
from appliance.gateway.calls import Calls
from appliance.gateway.cohere_classify import Classification
from appliance.gateway.cohere_embed import CohereEmbeddings
from appliance.gateway.cohere_tokens import Tokens
from appliance.gateway.decisions import Decisions
from appliance.gateway.embeddings import Embeddings
from appliance.gateway.extract import Extraction
from appliance.gateway.generation import Generation
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
    generation = Generation(calls)
    models = Models(calls.catalog, canary.tokens_max)
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
            paths=(*spellings("/v1/chat/completions"), "/openai/v1/chat/completions"),
            name="chat",
            summary="Write the next message of a chat, whole or as a stream",
            serve=generation.endpoint(openai_chat.decode),
            body=openai_chat.ChatBody,
            answer=ChatAnswer,
            stream_type=sse.EVENT_STREAM,
            headers=("x-appliance-ignored",),
        ),
        Operation(
            paths=("/openai/deployments/{name}/chat/completions",),
            name="chat",
            summary="The same at Azure's path, which names the model",
            serve_named=generation.deployment(openai_chat.decode),
            body=openai_chat.ChatBody,
            answer=ChatAnswer,
            stream_type=sse.EVENT_STREAM,
            query=("api-version",),
            headers=("x-appliance-ignored",),
        ),
        Operation(
            paths=(*spellings("/v1/completions"), "/openai/v1/completions"),
            name="completions",
            summary="Go on with a text, whole or as a stream",
            serve=generation.endpoint(openai_completions.decode, is_slow=True),
            body=openai_completions.CompletionBody,
            answer=openai_completions.CompletionAnswer,
            stream_type=sse.EVENT_STREAM,
            headers=("x-appliance-ignored",),
        ),
        Operation(
            paths=("/openai/deployments/{name}/completions",),
            name="completions",
            summary="The same at Azure's path, which names the model",
            serve_named=generation.deployment(openai_completions.decode, is_slow=True),
            body=openai_completions.CompletionBody,
            answer=openai_completions.CompletionAnswer,
            stream_type=sse.EVENT_STREAM,
            query=("api-version",),
            headers=("x-appliance-ignored",),
        ),
        Operation(
            paths=(*spellings("/v1/responses"), "/openai/v1/responses", "/openai/responses"),
            name="responses",
            summary="Answer to items of a conversation, whole or as a stream of events; nothing is stored",
            serve=generation.endpoint(openai_responses.decode, openai_responses.NAMES),
            body=openai_responses.ResponsesBody,
            answer=Response,
            stream_type=sse.EVENT_STREAM,
            headers=("x-appliance-ignored",),
        ),
        Operation(
            paths=(*spellings("/v1/decisions"), "/openai/v1/decisions"),
            name="decisions",
            summary="Say how probable predicates, choices and scores are, given an input",
            serve=Decisions(calls).post,
            body=decisions.DecisionsBody,
            answer=decisions.Decision,
            headers=("x-appliance-ignored",),
        ),
        Operation(
            paths=spellings("/v2/chat"),
            name="cohere_chat",
            summary="Write the next message of a chat, as Cohere's v2 API",
            serve=generation.endpoint(cohere_chat.decode, cohere_chat.NAMES),
            body=cohere_chat.CohereChatBody,
            answer=CohereChatAnswer,
            stream_type=sse.EVENT_STREAM,
            dialect="cohere",
            headers=("x-appliance-ignored",),
        ),
        Operation(
            paths=("/v1/chat", "/v1/v1/chat", "/v2/v1/chat"),
            name="cohere_chat",
            summary="Write the next message of a chat, as Cohere's v1 API",
            serve=generation.endpoint(cohere_chat_v1.decode, cohere_chat_v1.NAMES),
            body=cohere_chat_v1.CohereChatV1Body,
            answer=cohere_chat_v1_answer.CohereChatV1Answer,
            stream_type=cohere_chat_v1_answer.CONTENT_TYPE,
            dialect="cohere",
            headers=("x-appliance-ignored",),
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
            paths=(*spellings("/v1/models"), "/openai/v1/models", "/openai/models"),
            name="models",
            summary="List the served models and their aliases",
            serve=models.list,
            methods=("GET",),
            answer=ModelList,
            query=("endpoint", "default_only", "page_size", "page_token"),
        ),
        Operation(
            paths=(*spellings("/v1/models/{name}"), "/openai/v1/models/{name}", "/openai/models/{name}"),
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
