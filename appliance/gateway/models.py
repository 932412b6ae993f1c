"""`GET /v1/models` and `GET /v1/models/{name}`: the catalog, in the clients' words."""

import time
from collections.abc import Callable, Mapping

from msgspec import structs

from appliance.catalog import Catalog, Entry
from appliance.compat import models
from appliance.compat.models import CohereEndpoint, ModelObject
from appliance.errors import ModelNotFound
from appliance.gateway.http import Answer, Request, written
from appliance.presets import TaskName

# Which tasks make a model the default of an endpoint; the first that any served model does counts.
_DEFAULTS: dict[CohereEndpoint, tuple[TaskName, ...]] = {
    "embed": ("embed",),
    "rerank": ("rerank",),
    "classify": ("classify", "embed"),
    "extract": ("extract",),
}


class Models:
    """The two endpoints. Names with slashes come raw (`BAAI/bge-m3`) or percent-encoded; both arrive decoded here."""

    def __init__(self, catalog: Catalog, tokens_max: Callable[[str], int | None]) -> None:
        """`tokens_max` says of a model that writes what its node told."""
        created_s = int(time.time())
        defaults = _defaults(catalog)
        self._objects = {entry.id: _object(entry, created_s, defaults) for entry in catalog.entries()}
        self._catalog = catalog
        self._tokens_max = tokens_max

    async def list(self, request: Request) -> Answer:
        """Every served model and alias. Raises InvalidRequest for a parameter of the URL."""
        return written(
            models.page([self._told(one) for one in self._objects.values()], request.query), request.answer_form
        )

    async def get(self, request: Request, name: str) -> Answer:
        """One of them. Raises ModelNotFound. A name with an intent, "name@query", is served and not listed."""
        route = self._catalog.resolve(name)
        found = self._told(self._objects.get(name) or self._objects[name.rpartition("@")[0]])
        if found.id != name:
            found = structs.replace(found, id=name, name=name, root=route.model, default_endpoints=())
        return written(found, request.answer_form)

    def _told(self, known: ModelObject) -> ModelObject:
        """With what is only known once its node has answered."""
        if "generate" not in known.tasks:
            return known
        tokens_max = self._tokens_max(known.root or known.id)
        return structs.replace(known, tokens_max=tokens_max, context_length=tokens_max)


def _defaults(catalog: Catalog) -> Mapping[CohereEndpoint, str]:
    """The endpoints that a served model answers, each with the name of the model that does so by default."""
    found: dict[CohereEndpoint, str] = {}
    for endpoint, tasks in _DEFAULTS.items():
        try:
            found[endpoint] = catalog.default(*tasks).name
        except ModelNotFound:
            continue
    return found


def _object(entry: Entry, created_s: int, defaults: Mapping[CohereEndpoint, str]) -> ModelObject:
    return ModelObject(
        id=entry.id,
        object="model",
        created=created_s,
        owned_by=entry.owned_by,
        root=entry.is_alias_of,
        tasks=entry.tasks,
        width=entry.width,
        tokens_max=entry.tokens_max,
        outputs=entry.outputs,
        reranks_by=entry.reranks_by,
        name=entry.id,
        endpoints=models.endpoints(entry.tasks, entry.outputs),
        default_endpoints=tuple(endpoint for endpoint, name in defaults.items() if name == entry.id),
        context_length=entry.tokens_max,
    )
