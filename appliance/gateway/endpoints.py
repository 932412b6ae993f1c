"""How an endpoint function, `Request → Answer`, becomes a Litestar route.

Routes are `@asgi` handlers: Litestar's typed handlers cost each request about twice as much CPU. One handler serves a
path; it settles the method, runs the function, and words its errors.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, NamedTuple, cast

from litestar import Response, asgi
from litestar import route as litestar_route
from litestar.connection import Request as LitestarRequest
from litestar.datastructures import State
from litestar.handlers import ASGIRouteHandler, HTTPRouteHandler
from litestar.params import FromPath
from litestar.types import ASGIApp, HTTPScope, Receive, Scope, Send

from appliance.errors import ApplianceError, ClientGone, InternalError, MethodNotAllowed, UnknownPath
from appliance.gateway.http import Answer, Dialect, Headers, Request, StreamedAnswer, answer_of

AnyAnswer = Answer | StreamedAnswer
Endpoint = Callable[[Request], Awaitable[AnyAnswer]]
HttpMethodName = Literal["GET", "POST"]

_log = logging.getLogger(__name__)


def route(
    path: str | Sequence[str], name: str, methods: Mapping[str, Endpoint], *, dialect: Dialect = "openai"
) -> ASGIRouteHandler:
    """Serve a path, or several, with one function per method. `name` is the endpoint's label in metrics."""
    allowed = ", ".join(sorted(methods)).encode()

    @asgi(
        path if isinstance(path, str) else list(path), name=name, copy_scope=False
    )  # the label below is for the front
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["endpoint"] = name
        request = Request(cast("HTTPScope", scope), receive)
        endpoint = methods.get(request.method)
        if endpoint is None:
            answer: AnyAnswer = _wrong_method(request, allowed)
        else:
            answer = await _settled(endpoint(request), request, dialect=dialect)
        await answer.send(send)

    return handle


class Named(NamedTuple):
    """What serves the paths below one that end so."""

    name: str  # the endpoint's label in metrics
    endpoint: Callable[[Request, str], Awaitable[AnyAnswer]]


def named_route(bases: Sequence[str], method: HttpMethodName, by_end: Mapping[str, Named]) -> HTTPRouteHandler:
    """Serve paths below `bases`, by what they end with: "/deployments/{name}/embeddings" by "/embeddings".

    The name stands for any text, slashes included; the endpoint gets it, decoded. A typed handler, since Litestar reads
    no path parameters for `@asgi` ones: not for the hottest paths.
    """
    # The longest end first: "/chat/completions" ends with "/completions" too.
    ends = sorted(by_end, key=len, reverse=True)
    first = by_end[ends[0]].name

    @litestar_route(
        [f"{base}/{{rest:path}}" for base in bases], http_method=[method], name=f"{first}_named", status_code=200
    )
    async def handle(request: LitestarRequest[object, object, State], rest: FromPath[str]) -> ASGIApp:
        inner = Request(request.scope, request.receive)
        found = rest.removeprefix("/")
        end = next((end for end in ends if found.endswith(end) and found != end), None)
        if end is None:
            request.scope["state"]["endpoint"] = first
            return _sending(answer_of(UnknownPath(f"unknown path {request.url.path[:200]}")))
        named = by_end[end]
        request.scope["state"]["endpoint"] = named.name
        return _sending(await _settled(named.endpoint(inner, found.removesuffix(end)), inner, dialect="openai"))

    return handle


def as_response(answer: Answer) -> Response[bytes]:
    """The answer for Litestar's own machinery to send."""
    headers = {name.decode(): value.decode() for name, value in answer.headers}
    return Response(answer.body, status_code=answer.status, media_type=answer.content_type.decode(), headers=headers)


def _sending(answer: AnyAnswer) -> ASGIApp:
    """The answer sends itself: Litestar's own streaming would cancel its clean-up when a client leaves."""

    async def send_it(scope: Scope, receive: Receive, send: Send) -> None:
        await answer.send(send)

    return send_it


async def _settled(answering: Awaitable[AnyAnswer], request: Request, *, dialect: Dialect) -> AnyAnswer:
    """The endpoint's answer, or its error in the client's words."""
    try:
        return await answering
    except ClientGone as error:
        return answer_of(error)  # nobody reads it; the status is what is counted
    except ApplianceError as error:
        if error.status >= 500:
            _log.warning("%s %s: %s (%s)", request.method, request.path, error.message, error.code)
        return answer_of(error, dialect=dialect, form=request.answer_form)
    except Exception:
        # A bug. The client gets an answer without our insides, the log gets the traceback.
        _log.exception("%s %s failed", request.method, request.path)
        return answer_of(internal_error(), dialect=dialect, form=request.answer_form)


def internal_error() -> InternalError:
    """What a client is told of a bug."""
    return InternalError("the server made an error; its log has the details")


def _wrong_method(request: Request, allowed: bytes) -> Answer:
    error = MethodNotAllowed(f"{request.path} takes {allowed.decode()}, not {request.method}")
    headers: Headers = [(b"allow", allowed)]
    return answer_of(error, headers=headers)
