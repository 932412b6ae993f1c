"""`GET /v1/models` and `GET /v1/models/{id}`: the catalog, in the client's words."""

import time

from appliance.catalog import Catalog, Entry
from appliance.compat import openai_models
from appliance.compat.openai_models import ModelObject
from appliance.gateway.http import Answer, Request


class Models:
    """The two endpoints. Names with slashes come raw (`BAAI/bge-m3`) or percent-encoded; both arrive decoded here."""

    def __init__(self, catalog: Catalog) -> None:
        created_s = int(time.time())
        self._objects = {entry.id: _object(entry, created_s) for entry in catalog.entries()}
        self._catalog = catalog

    async def list(self, request: Request) -> Answer:
        """Every served model and alias."""
        return Answer(openai_models.encode_list(list(self._objects.values())))

    async def get(self, name: str) -> Answer:
        """One of them. Raises ModelNotFound."""
        return Answer(openai_models.encode_one(self._objects[self._catalog.resolve(name).name]))


def _object(entry: Entry, created_s: int) -> ModelObject:
    return ModelObject(
        id=entry.id,
        object="model",
        created=created_s,
        owned_by=entry.owned_by,
        root=entry.is_alias_of or "",
        tasks=entry.tasks,
        width=entry.width,
        tokens_max=entry.tokens_max,
    )
