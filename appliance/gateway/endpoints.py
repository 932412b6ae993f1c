"""How an endpoint function, `Request → Answer`, becomes a Litestar route.

Routes are `@asgi` handlers: Litestar's typed handlers cost each request about twice as much CPU. One handler serves a
path; it settles the method, runs the function, and words its errors.
"""

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from litestar import asgi
from litestar.handlers import ASGIRouteHandler
from litestar.types import HTTPScope, Receive, Scope, Send

from appliance.errors import ApplianceError, ClientGone, InternalError, MethodNotAllowed
from appliance.gateway.http import Answer, Headers, Request, answer_of

Endpoint = Callable[[Request], Awaitable[Answer]]

_log = logging.getLogger(__name__)


def route(path: str, name: str, methods: Mapping[str, Endpoint]) -> ASGIRouteHandler:
    """Serve `path` with one function per method. `name` is the endpoint's label in metrics."""
    allowed = ", ".join(sorted(methods)).encode()

    @asgi(path, name=name)
    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["endpoint"] = name
        request = Request(cast("HTTPScope", scope), receive)
        endpoint = methods.get(request.method)
        if endpoint is None:
            answer = _wrong_method(request, allowed)
        else:
            answer = await _run(endpoint, request)
        await answer.send(send)

    return handle


async def _run(endpoint: Endpoint, request: Request) -> Answer:
    try:
        return await endpoint(request)
    except ClientGone as error:
        return answer_of(error)  # nobody reads it; the status is what is counted
    except ApplianceError as error:
        if error.status >= 500:
            _log.warning("%s %s: %s (%s)", request.method, request.path, error.message, error.code)
        return answer_of(error)
    except Exception:
        # A bug. The client gets an answer without our insides, the log gets the traceback.
        _log.exception("%s %s failed", request.method, request.path)
        return answer_of(InternalError("the server made an error; its log has the details under this request id"))


def _wrong_method(request: Request, allowed: bytes) -> Answer:
    error = MethodNotAllowed(f"{request.path} takes {allowed.decode()}, not {request.method}")
    headers: Headers = [(b"allow", allowed)]
    return answer_of(error, headers=headers)
