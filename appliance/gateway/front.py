"""What holds for every path, known or not: a request id, the key, an answer in shape, and the count of it.

A plain ASGI layer around the Litestar app, since a framework middleware costs each request several times as much.
"""

import hashlib
import hmac
import itertools
import logging
import re
import secrets
import time
from collections.abc import Collection, Mapping, Sequence

from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from appliance import logs, telemetry
from appliance.errors import ApplianceError, Unauthorized
from appliance.gateway.http import ASKED, BODIES, IS_OWN, BodyBudget, answer_of, header
from appliance.gateway.key_rates import KeyRates

_SAFE_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")

_log = logging.getLogger(__name__)


class Keys:
    """The accepted API keys. Compared by digest, all of them every time: the time taken tells nothing."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, authorization: bytes | None, api_key: bytes | None = None) -> int:
        """The number of the key that a header carries, `Authorization` or Azure's; 0 if no keys are set.

        Raises Unauthorized for none of them.
        """
        if not self._digests:
            return 0
        key = api_key if api_key is not None and authorization is None else _bearer(authorization)
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise Unauthorized("incorrect API key; check the key, or the server's APPLIANCE_API_KEY")
        return matches.index(True)


def _bearer(authorization: bytes | None) -> bytes:
    if authorization is None:
        raise Unauthorized("no API key; send it as 'Authorization: Bearer <key>'")
    scheme, _, key = authorization.partition(b" ")
    if scheme.lower() != b"bearer":
        raise Unauthorized("the Authorization header is not of the form 'Bearer <key>'")
    return key


class Front:
    """The outermost ASGI app."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        bodies: BodyBudget,
        *,
        open_paths: Collection[str],
        direct: Mapping[str, ASGIApp],
        rates: KeyRates | None = None,
    ) -> None:
        """`open_paths` are served without a key. `rates` are those of inference, which is what is posted.

        `direct` paths go straight to their handler: routing would cost such a request a sixth of its CPU.
        """
        self._app = app
        self._open_paths = open_paths
        self._direct = direct
        self._keys = keys
        self._rates = rates
        self._bodies = bodies
        self._id_prefix = secrets.token_hex(10).encode()  # of this process: no other gateway makes the same ids
        self._count = itertools.count()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == ScopeType.HTTP:
            await self._serve(scope, receive, send)
        elif scope["type"] == ScopeType.WEBSOCKET:
            await send({"type": "websocket.close", "code": 1000, "reason": "not served"})
        else:
            await self._app(scope, receive, send)  # lifespan

    async def _serve(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        request_id = self._request_id(header(scope, b"x-request-id"))
        started_s = time.perf_counter()
        status = 499
        scope.setdefault("state", {})[BODIES] = self._bodies
        logs.request_id.set(request_id.decode())  # of this task and those that it starts

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                elapsed_ms = b"%d" % ((time.perf_counter() - started_s) * 1000)
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id),
                    (b"openai-processing-ms", elapsed_ms),
                ]
            await send(message)

        try:
            if scope["path"] not in self._open_paths:
                key = self._keys.check(header(scope, b"authorization"), header(scope, b"api-key"))
                if self._rates is not None and scope["method"] == "POST":
                    self._rates.take(key, now_s=started_s)
            app = self._direct.get(scope["path"], self._app)
            await app(scope, receive, send_with_id)
        except ApplianceError as error:
            await answer_of(error).send(send_with_id)
        finally:
            if IS_OWN not in scope["state"]:
                _note(scope, status, time.perf_counter() - started_s)

    def _request_id(self, offered: bytes | None) -> bytes:
        """The client's own id where it is harmless in a header and a log, else a fresh one."""
        if offered is not None and _SAFE_ID.fullmatch(offered):
            return offered
        return b"req_%s%012x" % (self._id_prefix, next(self._count))


def _note(scope: HTTPScope, status: int, lasted_s: float) -> None:
    """Count a request that is over, and log it; nothing that it said."""
    endpoint = str(scope["state"].get("endpoint", "other"))
    telemetry.REQUESTS.labels(endpoint, str(status)).inc()
    telemetry.REQUEST_SECONDS.labels(endpoint).observe(lasted_s)
    asked = scope["state"].get(ASKED, "")
    _log.debug("%s %s: %d after %.0f ms%s", scope["method"], scope["path"][:200], status, lasted_s * 1000, asked)
