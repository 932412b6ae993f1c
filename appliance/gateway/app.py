"""The ASGI app: which path is served by what, and how faults that Litestar finds are worded."""

import logging

from litestar import Litestar, Response
from litestar.connection import Request as LitestarRequest
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.handlers import ASGIRouteHandler
from litestar.types import ASGIApp

from appliance.catalog import Catalog
from appliance.errors import ApplianceError, InvalidRequest, MethodNotAllowed, UnknownPath
from appliance.gateway.calls import Calls
from appliance.gateway.dispatch import Dispatcher
from appliance.gateway.endpoints import as_response, internal_error
from appliance.gateway.front import Front, Keys
from appliance.gateway.health import Canary
from appliance.gateway.http import BodyBudget, Headers, answer_of
from appliance.gateway.key_rates import KeyRates
from appliance.gateway.operation import handlers
from appliance.gateway.paths import base_url_hint
from appliance.gateway.surface import operations
from appliance.settings import GatewaySettings, Settings

_log = logging.getLogger(__name__)


def build_app(settings: Settings, *, catalog: Catalog, dispatcher: Dispatcher, canary: Canary) -> ASGIApp:
    """Wire the endpoints. The caller runs the dispatcher's queue and the canary."""
    calls = Calls(catalog=catalog, dispatcher=dispatcher, canary=canary, gateway=settings.gateway, queue=settings.queue)
    surface = operations(calls, canary)
    routed = handlers(surface)
    app = Litestar(
        route_handlers=routed,
        exception_handlers={HTTPException: _http_fault, Exception: _bug},
        openapi_config=None,
        logging_config=None,
    )
    return Front(
        app,
        Keys(settings.gateway.api_keys),
        BodyBudget(settings.gateway.pending_bytes_max),
        open_paths=frozenset(path for operation in surface if operation.is_open for path in operation.paths),
        direct={path: each.fn for each in routed if isinstance(each, ASGIRouteHandler) for path in each.paths},
        rates=_rates(settings.gateway),
    )


def _rates(gateway: GatewaySettings) -> KeyRates | None:
    """This process' share: the kernel spreads connections over the gateways of a machine."""
    if not gateway.key_requests_per_minute:
        return None
    return KeyRates(keys=len(gateway.api_keys), requests_per_minute=gateway.key_requests_per_minute / gateway.processes)


def _http_fault(request: LitestarRequest[object, object, State], fault: HTTPException) -> Response[bytes]:
    """What Litestar itself refuses: unknown paths, wrong methods, and requests it cannot read."""
    allowed = (fault.headers or {}).get("allow", "").split(", ")
    named = ", ".join(method for method in allowed if method != "OPTIONS")  # which Litestar answers by itself
    headers: Headers = [(b"allow", named.encode())] if named else []
    return as_response(answer_of(_error_of(fault, path=request.url.path), headers=headers))


def _bug(request: LitestarRequest[object, object, State], fault: Exception) -> Response[bytes]:
    """A fault outside of any endpoint."""
    _log.error("%s %s failed outside of its endpoint", request.method, request.url.path, exc_info=fault)
    return as_response(answer_of(internal_error()))


def _error_of(fault: HTTPException, *, path: str) -> ApplianceError:
    match fault.status_code:
        case 404:
            return UnknownPath(f"unknown path {path[:200]}{base_url_hint(path)}")
        case 405:
            return MethodNotAllowed(f"{path[:200]} does not take this method")
        case status if 400 <= status < 500:
            return InvalidRequest("the request cannot be read")
        case _:
            return internal_error()
