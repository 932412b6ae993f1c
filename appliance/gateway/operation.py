"""One operation: where it is mounted, what serves it, and what the OpenAPI document says of it.

Routes and document are both made of the same operations, so neither can name what the other does not.
"""

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

import msgspec
from litestar.handlers import ASGIRouteHandler, HTTPRouteHandler

from appliance.gateway.endpoints import AnyAnswer, Endpoint, HttpMethodName, Named, named_route, route
from appliance.gateway.http import JSON, Dialect, Request

PostOrGet = ASGIRouteHandler | HTTPRouteHandler
ServeNamed = Callable[[Request, str], Awaitable[AnyAnswer]]


@dataclass(frozen=True)
class Operation:
    """A method (or several that are served alike) of a path and its aliases.

    `{name}` in a path takes any text, slashes included; `serve_named` serves it, by one method.
    """

    paths: tuple[str, ...]  # the first is the one to use; the others are what some clients make of it
    name: str  # the endpoint's label in metrics
    summary: str  # one line, for the document
    serve: Endpoint | None = None
    serve_named: ServeNamed | None = None
    methods: tuple[str, ...] = ("POST",)
    body: type[msgspec.Struct] | None = None  # what it takes, as JSON or msgpack
    answer: type[msgspec.Struct] | None = None  # what it answers with; None: something else than an object
    content_type: bytes = JSON  # of the answer
    stream_type: bytes = b""  # of the stream that comes instead where the body asks for one; b"": there is none
    query: tuple[str, ...] = ()  # parameters of the URL that are read, or known and ignored
    dialect: Dialect = "openai"  # whose error body it answers with
    statuses: tuple[int, ...] = ()  # of answers in the same shape, besides 200
    headers: tuple[str, ...] = ()  # of the answer, by their names in `openapi.HEADERS`
    is_open: bool = False  # served without a key


def handlers(operations: Iterable[Operation]) -> list[PostOrGet]:
    """Litestar's handlers: one a set of paths, whatever the number of methods, or of ends after a name."""
    by_paths: dict[tuple[str, ...], list[Operation]] = {}
    by_bases: dict[tuple[tuple[str, ...], HttpMethodName], dict[str, Named]] = {}
    for operation in operations:
        if operation.serve_named is None:
            by_paths.setdefault(operation.paths, []).append(operation)
            continue
        method: HttpMethodName = "GET" if operation.methods == ("GET",) else "POST"
        ends = {path.partition("{name}")[2] for path in operation.paths}
        assert len(ends) == 1, "paths of one operation end alike"
        bases = tuple(path.partition("/{name}")[0] for path in operation.paths)
        by_bases.setdefault((bases, method), {})[ends.pop()] = Named(operation.name, operation.serve_named)
    found: list[PostOrGet] = [_handler(paths, same) for paths, same in by_paths.items()]
    return found + [named_route(bases, method, by_end) for (bases, method), by_end in by_bases.items()]


def _handler(paths: tuple[str, ...], operations: list[Operation]) -> ASGIRouteHandler:
    first = operations[0]
    methods = {method: each.serve for each in operations for method in each.methods if each.serve is not None}
    return route(paths, first.name, methods, dialect=first.dialect)
