"""`GET /v1/models` and `GET /v1/models/{id}` in OpenAI's dialect."""

from collections.abc import Sequence

import msgspec


class ModelObject(msgspec.Struct, frozen=True, omit_defaults=True):
    """One public name. The first four fields are OpenAI's; the others are additive."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str = ""  # what an alias stands for
    tasks: tuple[str, ...] = ()
    width: int | None = None
    tokens_max: int | None = None


class ModelList(msgspec.Struct, frozen=True):
    """All of them."""

    object: str
    data: Sequence[ModelObject]


def encode_list(models: Sequence[ModelObject]) -> bytes:
    """The whole list; OpenAI does not page it."""
    return msgspec.json.encode(ModelList("list", models))


def encode_one(model: ModelObject) -> bytes:
    """One model."""
    return msgspec.json.encode(model)
