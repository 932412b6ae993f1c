"""The catalog: which public names are served, and by which model. Pure, and built without any model's files."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from appliance.errors import ModelNotFound, StartupError
from appliance.presets import Facts
from appliance.tables import did_you_mean, shown

NAMES_SHOWN_MAX = 20


@dataclass(frozen=True)
class Route:
    """Where one public name leads."""

    name: str  # what the client asked for
    facts: Facts  # the model that answers

    @property
    def model(self) -> str:
        """The served model's own name, as jobs carry it."""
        return self.facts.name

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
    tasks: tuple[str, ...]
    width: int | None  # None: known only when the model is loaded
    tokens_max: int | None


class Catalog:
    """Public name → `Route`. Immutable."""

    def __init__(self, routes: Mapping[str, Route]) -> None:
        self._routes = MappingProxyType(dict(routes))

    @classmethod
    def of(cls, models: Iterable[Facts]) -> "Catalog":
        """Raises `StartupError` where two models claim one public name."""
        routes: dict[str, Route] = {}
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
        return cls(routes)

    def resolve(self, name: str) -> Route:
        """The route of a public name, matched exactly. Raises `ModelNotFound` that says what is served."""
        route = self._routes.get(name)
        if route is None:
            raise ModelNotFound(
                f"the model {shown(name)} is not served here{did_you_mean(name, self._routes)}; "
                f"served: {self._listed()}",
                param="model",
            )
        return route

    def entries(self) -> tuple[Entry, ...]:
        """Every public name, each model followed by its aliases."""
        return tuple(_entry(route) for route in self._routes.values())

    def models(self) -> tuple[str, ...]:
        """The served models' own names, in order."""
        return tuple(route.name for route in self._routes.values() if not route.is_alias)

    def tasks(self) -> dict[str, tuple[str, ...]]:
        """The served models' own names, each with what it does."""
        return {route.name: route.facts.tasks for route in self._routes.values() if not route.is_alias}

    def _listed(self) -> str:
        names = list(self._routes)
        more = f" and {len(names) - NAMES_SHOWN_MAX} more" if len(names) > NAMES_SHOWN_MAX else ""
        return ", ".join(names[:NAMES_SHOWN_MAX]) + more


def _entry(route: Route) -> Entry:
    facts = route.facts
    owner, slash, _ = facts.name.partition("/")
    return Entry(
        id=route.name,
        owned_by=owner if slash else "appliance",
        is_alias_of=facts.name if route.is_alias else None,
        tasks=facts.tasks,
        width=facts.width,
        tokens_max=facts.tokens_max,
    )
