"""A lean HTTP/1.1 client for load: POST a prepared request over kept-alive connections, and read the whole answer.

It is an asyncio protocol over httptools, because the client's own CPU disturbs what a load test on one machine
measures: on uvloop about 11 µs a request, where aiohttp took 100 and httpx 1,500. No redirects, proxies or compression.
"""

import asyncio
import ssl
from collections import deque
from types import TracebackType
from typing import Self, cast
from urllib.parse import urlsplit

import httptools
import msgspec

from appliance.errors import StartupError

ANSWER_BYTES_MAX = 256 * 1024 * 1024
CONNECT_TIMEOUT_S = 5.0


class Answer(msgspec.Struct, frozen=True):
    """What came back."""

    status: int
    body: bytes


class Unanswered(Exception):  # a condition, as errors.py names its own
    """No answer came: the server cannot be reached, hung up, or speaks something else."""


class Address(msgspec.Struct, frozen=True):
    """A base URL, taken apart."""

    host: str
    port: int
    is_tls: bool
    path: str  # without a slash at its end

    @staticmethod
    def of(base_url: str) -> "Address":
        """Raises StartupError for what is no http or https URL."""
        parts = urlsplit(base_url)
        try:
            port = parts.port
        except ValueError as error:
            raise StartupError(
                f"the base URL {base_url!r} has no valid port; give one such as http://host:8080/v1"
            ) from error
        if parts.scheme not in {"http", "https"} or not parts.hostname:
            raise StartupError(f"the base URL {base_url!r} is not http or https; give one such as http://host:8080/v1")
        is_tls = parts.scheme == "https"
        return Address(parts.hostname, port or (443 if is_tls else 80), is_tls, parts.path.rstrip("/"))


class Connections:
    """Connections to one server, kept alive and reused. A request that finds none idle opens one."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._tls = ssl.create_default_context() if address.is_tls else None
        self._idle: deque[_Connection] = deque()
        self._open: set[_Connection] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in list(self._open):
            connection.close()

    def post(self, path: str, body: bytes, *, key: str | None) -> bytes:
        """The bytes of a request to `path` below the base URL; to be sent with `send`, any number of times."""
        authorization = f"authorization: Bearer {key}\r\n" if key else ""
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        head = (
            f"POST {self._address.path}{path} HTTP/1.1\r\nhost: {host}:{self._address.port}\r\n{authorization}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return head.encode("latin-1") + body

    async def send(self, request: bytes) -> Answer:
        """Send and wait for the whole answer. When cancelled, the connection is closed. Raises Unanswered."""
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            answer = await connection.exchange(request)
        except BaseException:
            connection.close()
            raise
        if connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def forget(self, connection: "_Connection") -> None:
        """The connection is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self), self._address.host, self._address.port, ssl=self._tls
                )
        except TimeoutError as error:
            raise Unanswered(f"no connection in {CONNECT_TIMEOUT_S:.0f} s") from error
        except OSError as error:
            raise Unanswered(f"no connection: {error.strerror or error}") from error
        self._open.add(connection)
        return connection


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time. Its `on_…` methods are httptools' callbacks."""

    def __init__(self, owner: Connections) -> None:
        self.is_reusable = False
        self._owner = owner
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[Answer] | None = None
        self._body: list[bytes] = []
        self._body_bytes = 0

    async def exchange(self, request: bytes) -> Answer:
        if self._transport is None or self._transport.is_closing():
            raise Unanswered("the server closed the connection")
        self.is_reusable = False
        self._parser = httptools.HttpResponseParser(self)
        self._answer = asyncio.get_running_loop().create_future()
        self._body, self._body_bytes = [], 0
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
        self._owner.forget(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is one without deriving from it

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"the server does not speak HTTP/1.1: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.forget(self)
        self._fail("the server hung up" if exc is None else f"the connection broke: {exc}")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._body_bytes += len(body)
        if self._body_bytes > ANSWER_BYTES_MAX:
            self._fail(f"the answer is over {ANSWER_BYTES_MAX} B")

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 or self._answer is None or self._answer.done():
            return  # 1xx announce the answer; the rest comes after a failure
        self.is_reusable = self._parser.should_keep_alive()
        self._answer.set_result(Answer(status, b"".join(self._body)))

    def _fail(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Unanswered(reason))
        if self._transport is not None:
            self._transport.abort()
