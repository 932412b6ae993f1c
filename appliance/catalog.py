"""The catalog: which public names are served, and by which model. Pure, and built without any model's files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, cast, get_args

from appliance.errors import ModelNotFound, StartupError
from appliance.jobs import Intent, Output, Truncation
from appliance.presets import Facts, TaskName
from appliance.settings import AliasSettings
from appliance.tables import did_you_mean, shown

NAMES_SHOWN_MAX = 20
TooLong = Literal["truncate", "error", "chunk_mean"]
_TRUNCATIONS: dict[TooLong, Truncation] = {"truncate": "end", "error": "none", "chunk_mean": "chunk_mean"}

RerankBy = Literal["cross-encoder", "similarity", "maxsim"]


@dataclass(frozen=True)
class Policy:
    """How one public name is served, where the client's request leaves it open; see `AliasSettings`."""

    intent: Intent | None = None
    width: int | None = None
    pad_to: int | None = None
    too_long: TooLong = "truncate"
    has_native_ids: bool = False

    @property
    def truncation(self) -> Truncation:
        """`too_long`, as an embedding's job says it."""
        return _TRUNCATIONS[self.too_long]


@dataclass(frozen=True)
class Route:
    """Where one public name leads."""

    name: str  # what the client asked for
    facts: Facts  # the model that answers
    policy: Policy = Policy()

    @property
    def model(self) -> str:
        """The served model's own name, as jobs carry it."""
        return self.facts.name

    @property
    def reranks_by(self) -> RerankBy | None:
        """What its scores of relevance are; None for a model that does not rerank."""
        return (self.facts.rerank_by or "cross-encoder") if "rerank" in self.facts.tasks else None

    @property
    def outputs(self) -> tuple[Output, ...]:
        """What a model that embeds makes of a text, the default first; nothing of another model."""
        return self.facts.outputs if "embed" in self.facts.tasks else ()

    @property
    def is_alias(self) -> bool:
        """Whether the client used another name than the model's own."""
        return self.name != self.facts.name


@dataclass(frozen=True)
class Entry:
    """One row of `GET /v1/models`."""

    id: str
    owned_by: str
    is_alias_of: str | None  # the model that answers to this alias; None for a model's own name
    tasks: tuple[TaskName, ...]
    width: int | None  # None: known only when the model is loaded
    tokens_max: int | None  # None also of a model that writes: only its node knows what it gives a text
    outputs: tuple[Output, ...] = ()
    reranks_by: RerankBy | None = None


class Catalog:
    """Public name → `Route`. Immutable."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self._routes = MappingProxyType(dict(routes))

    @classmethod
    def of(cls, models: Iterable[Facts], aliases: Iterable[AliasSettings] = ()) -> "Catalog":
        """Raises `StartupError` where two models claim one public name, or an alias' policy does not fit its model."""
        routes: dict[str, Route] = {}
        models = list(models)
        for facts in models:
            # An alias that repeats the model's own name, or itself, changes nothing.
            for name in dict.fromkeys((facts.name, *facts.aliases)):
                if name in routes:
                    raise StartupError(
                        f'"{routes[name].model}" and "{facts.name}" both claim the public name "{name}"; set `aliases` '
                        "in one of their [[models]] tables"
                    )
                if not name:
                    raise StartupError(f'"{facts.name}" has an empty alias; remove it from `aliases`')
                routes[name] = Route(name, facts)
        by_name = {facts.name: facts for facts in models}
        for alias in aliases:
            routes[alias.name] = _aliased(alias, by_name, routes)
        return cls(routes)

    def resolve(self, name: str) -> Route:
        """The route of a public name, matched exactly; raises `ModelNotFound` that says what is served.

        "name@query" and "name@document" are "name" for that intent, unless they are names of their own.
        """
        route = self._routes.get(name)
        if route is None:
            base, _, intent = name.rpartition("@")
            if base in self._routes and intent in get_args(Intent):
                bare = self._routes[base]
                return replace(bare, name=name, policy=replace(bare.policy, intent=cast("Intent", intent)))
            raise ModelNotFound(
                f"the model {shown(name)} is not served here{did_you_mean(name, self._routes)}; "
                f"served: {self._listed()}",
                param="model",
            )
        return route

    def default(self, *tasks: TaskName) -> Route:
        """The model for a client that names none: the first that does the first of `tasks`, else the next of them.

        To embed is to give dense vectors here, which a client that names no model expects.
        """
        models = [route for route in self._routes.values() if not route.is_alias]
        for task in tasks:
            for route in models:
                if task in route.facts.tasks and (task != "embed" or "dense" in route.outputs):
                    return route
        raise ModelNotFound(f"no model served here does {' or '.join(tasks)}; see GET /v1/models", param="model")

    def entries(self) -> tuple[Entry, ...]:
        """Every public name, each model followed by its aliases."""
        return tuple(_entry(route) for route in self._routes.values())

    def models(self) -> tuple[str, ...]:
        """The served models' own names, in order."""
        return tuple(route.name for route in self._routes.values() if not route.is_alias)

    def tasks(self) -> dict[str, tuple[str, ...]]:
        """The served models' own names, each with what it does."""
        return {route.name: route.facts.tasks for route in self._routes.values() if not route.is_alias}

    def outputs(self) -> dict[str, Output]:
        """The served models that embed, each with what it gives unasked."""
        return {route.name: route.outputs[0] for route in self._routes.values() if route.outputs and not route.is_alias}

    def _listed(self) -> str:
        names = list(self._routes)
        more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
        return ", ".join(names[:NAMES_SHOWN_MAX]) + more


def _aliased(alias: AliasSettings, models: Mapping[str, Facts], routes: Mapping[str, Route]) -> Route:
    """The route of an alias with a policy. A name that a preset gave to the same model is taken over."""
    facts = models.get(alias.model)
    if facts is None:
        raise StartupError(
            f'aliases "{alias.name}": model {shown(alias.model)} is not served{did_you_mean(alias.model, models)}; '
            "name one of [[models]]"
        )
    if not alias.name:
        raise StartupError(f'an alias of "{alias.model}" has an empty name')
    if alias.name in routes and routes[alias.name].model != alias.model:
        raise StartupError(
            f'"{routes[alias.name].model}" and the alias of "{alias.model}" both claim the public name "{alias.name}"; '
            "set `aliases` in the [[models]] table of the former"
        )
    _check_options(alias, facts)
    widest = alias.width or facts.width
    if alias.pad_to is not None and widest is not None and alias.pad_to < widest:
        raise StartupError(f'aliases "{alias.name}": pad_to is {alias.pad_to}, less than the {widest} of the vectors')
    policy = Policy(
        intent=alias.intent or None,
        width=alias.width,
        pad_to=alias.pad_to,
        too_long=alias.too_long,
        has_native_ids=alias.integers == "native",
    )
    return Route(alias.name, facts, policy)


def _check_options(alias: AliasSettings, facts: Facts) -> None:
    """Raises `StartupError` for an option that would change nothing of what the model does."""
    if "embed" in facts.tasks:
        return
    of_vectors = {
        "intent": bool(alias.intent),
        "width": alias.width is not None,
        "pad_to": alias.pad_to is not None,
        "too_long": alias.too_long == "chunk_mean",
        "integers": alias.integers != "openai",
    }
    for option, is_set in of_vectors.items():
        if is_set:
            raise StartupError(
                f'aliases "{alias.name}": {option} is {shown(getattr(alias, option))}, which "{facts.name}" has no use '
                f"for: its tasks are {list(facts.tasks)}; leave {option} out"
            )


def _entry(route: Route) -> Entry:
    facts = route.facts
    owner, slash, _ = facts.name.partition("/")
    return Entry(
        id=route.name,
        owned_by=owner if slash else "appliance",
        is_alias_of=facts.name if route.is_alias else None,
        tasks=facts.tasks,
        width=facts.width,
        tokens_max=None if "generate" in facts.tasks else facts.tokens_max,
        outputs=route.outputs,
        reranks_by=route.reranks_by,
    )
