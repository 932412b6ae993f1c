"""Everything that is served over HTTP, as one table."""

from appliance import telemetry
from appliance.compat import openai_embeddings, openai_models
from appliance.gateway.calls import Calls
from appliance.gateway.embeddings import Embeddings
from appliance.gateway.health import Canary, Health
from appliance.gateway.http import Answer, Request
from appliance.gateway.models import Models
from appliance.gateway.operation import Operation


def operations(calls: Calls, canary: Canary) -> tuple[Operation, ...]:
    """The table. Add an endpoint here and nowhere else: its routes, its documentation and its bounds follow."""
    embeddings = Embeddings(calls)
    models = Models(calls.catalog)
    health = Health(canary, calls.catalog.models())
    return (
        Operation(
            paths=("/v1/embeddings",),
            name="embeddings",
            summary="Turn texts into vectors",
            serve=embeddings.post,
            body=openai_embeddings.EmbeddingsBody,
            answer=openai_embeddings.EmbeddingsAnswer,
            headers=("x-appliance-ignored", "x-appliance-truncated"),
            is_hot=True,
        ),
        Operation(
            paths=("/v1/models",),
            name="models",
            summary="List the served models and their aliases",
            serve=models.list,
            methods=("GET",),
            answer=openai_models.ModelList,
        ),
        Operation(
            paths=("/v1/models/{name}",),
            name="models",
            summary="One served model or alias; slashes in its name may come raw or percent-encoded",
            serve_below=models.get,
            methods=("GET",),
            answer=openai_models.ModelObject,
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


async def metrics(request: Request) -> Answer:
    """Prometheus' text format."""
    return Answer(telemetry.exposition(), content_type=telemetry.CONTENT_TYPE)
