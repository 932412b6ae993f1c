"""`GET /v1/models` and `GET /v1/models/{name}`: one object in the words of both OpenAI and Cohere.

Both families ask at the same URLs, and each ignores the other's fields. OpenAI's `data` is always all of it, as its
clients know no pages. Cohere's `models` is filtered and paged by the parameters of the URL.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from appliance.errors import InvalidRequest
from appliance.jobs import Output
from appliance.presets import TaskName

PAGE_SIZE_MAX = 1000  # Cohere's; also ours by default, where Cohere's is 20, as most callers look at one page only

CohereEndpoint = Literal["embed", "rerank", "classify", "extract", "chat"]

# A model that gives dense vectors classifies by examples.
_ENDPOINTS: dict[TaskName, tuple[CohereEndpoint, ...]] = {
    "embed": ("embed", "classify"),
    "rerank": ("rerank",),
    "classify": ("classify",),
    "extract": ("extract",),
    "generate": ("chat",),
}


class ModelObject(msgspec.Struct, frozen=True):
    """One public name: OpenAI's fields, ours, and Cohere's."""

    id: str
    object: Literal["model"]
    created: int  # unix seconds
    owned_by: str
    root: str | None  # what an alias stands for
    tasks: tuple[TaskName, ...]
    width: int | None
    tokens_max: int | None
    outputs: tuple[Output, ...]  # what a model that embeds gives, the default first
    reranks_by: Literal["cross-encoder", "similarity", "maxsim"] | None  # of a model that reranks
    name: str
    endpoints: tuple[CohereEndpoint, ...]
    default_endpoints: tuple[CohereEndpoint, ...]  # where it answers to a client that names no model
    context_length: int | None
    is_deprecated: bool = False
    finetuned: bool = False
    tokenizer_url: None = None  # cohere-python would tokenize with it by itself, not with the model's own limits
    features: None = None


class ModelList(msgspec.Struct, frozen=True):
    """All names as `data`, and those asked for as `models`."""

    object: Literal["list"]
    data: Sequence[ModelObject]
    models: Sequence[ModelObject]
    next_page_token: str | None = None


def endpoints(tasks: Sequence[TaskName], outputs: Sequence[Output]) -> tuple[CohereEndpoint, ...]:
    """Cohere's endpoints that a model serves; they know dense vectors only."""
    served = [task for task in tasks if task != "embed" or "dense" in outputs]
    return tuple(dict.fromkeys(endpoint for task in served for endpoint in _ENDPOINTS[task]))


def page(models: Sequence[ModelObject], query: Mapping[str, str]) -> ModelList:
    """The list for the URL's parameters `endpoint`, `default_only`, `page_size` and `page_token`.

    Raises InvalidRequest, which names the parameter, for what is no value of it.
    """
    endpoint = query.get("endpoint")
    is_default_only = _flag(query, "default_only")
    wanted = [model for model in models if _is_wanted(model, endpoint, is_default_only=is_default_only)]
    size = _integer(query, "page_size", least=1, most=PAGE_SIZE_MAX, default=PAGE_SIZE_MAX)
    start = _integer(query, "page_token", least=0, most=len(wanted), default=0)
    is_last = start + size >= len(wanted)
    return ModelList("list", models, wanted[start : start + size], None if is_last else str(start + size))


def _is_wanted(model: ModelObject, endpoint: str | None, *, is_default_only: bool) -> bool:
    offered = model.default_endpoints if is_default_only else model.endpoints
    return (bool(offered) or not is_default_only) if endpoint is None else endpoint in offered


def _flag(query: Mapping[str, str], name: str) -> bool:
    value = query.get(name, "false").lower()
    if value not in {"true", "false"}:
        raise InvalidRequest(f"'{name}' is '{value[:20]}'; it must be true or false", param=name)
    return value == "true"


def _integer(query: Mapping[str, str], name: str, *, least: int, most: int, default: int) -> int:
    """cohere-python's numbers are floats: "20.0"."""
    value = query.get(name)
    if value is None:
        return default
    digits = value.removesuffix(".0")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 10 and least <= int(digits) <= most):
        raise InvalidRequest(
            f"'{name}' is '{value[:20]}'; it must be a whole number from {least} to {most}", param=name
        )
    return int(digits)
