"""What an endpoint sees of HTTP: a `Request` to read and an `Answer` to return."""

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Literal, cast
from urllib.parse import parse_qsl

import msgspec
from litestar.types import HTTPScope, Receive, Send

from appliance.compat import cohere_errors, openai_errors
from appliance.compat.formats import CONTENT_TYPES, Format, encode, format_of
from appliance.errors import ApplianceError, BodyTooLarge, ClientGone, Overloaded

JSON = CONTENT_TYPES["json"]
# In a scope's state: where the front leaves the `BodyBudget`, what is logged of a request besides its path, and whether
# the appliance itself asks, whose requests are in no figure.
BODIES = "bodies"
ASKED = "asked"
IS_OWN = "is_own"
Headers = list[tuple[bytes, bytes]]
Dialect = Literal["openai", "cohere"]  # whose error body a path answers with


class Answer(msgspec.Struct, frozen=True):
    """A whole response."""

    body: bytes
    status: int = 200
    content_type: bytes = JSON
    headers: Headers = []

    async def send(self, send: Send) -> None:
        """Write it to the client."""
        headers = [
            (b"content-type", self.content_type),
            (b"content-length", b"%d" % len(self.body)),
            *self.headers,
        ]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": False})


class StreamedAnswer:
    """A response that goes out in parts, as they come."""

    def __init__(
        self,
        parts: AsyncIterator[bytes],
        *,
        content_type: bytes,
        headers: Headers,
        close: Callable[[], Awaitable[None]],
    ) -> None:
        """`close` is called at the end, however it comes, also where no part was ever taken."""
        self.parts = parts
        self.content_type = content_type
        # Proxies are not to collect or compress it.
        self.headers: Headers = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no"), *headers]
        self.status = 200
        self.close = close

    async def send(self, send: Send) -> None:
        """Write it to the client."""
        try:
            headers = [(b"content-type", self.content_type), *self.headers]
            await send({"type": "http.response.start", "status": self.status, "headers": headers})
            async for part in self.parts:
                if part:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.close()


class BodyBudget:
    """The bytes of all bodies that are being read at this moment; bounded."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self.bytes = 0

    def take(self, size: int) -> None:
        """Raises Overloaded when that is more than is left."""
        if self.bytes + size > self._bytes_max:
            raise Overloaded(
                f"{self.bytes} B of requests are being read and the gateway takes {self._bytes_max} B; try again later"
            )
        self.bytes += size

    def give_back(self, size: int) -> None:
        """What was taken is held no more, or is somebody else's to count."""
        self.bytes -= size


class Request:
    """One request. `receive` is read by `body` first and by `gone` after it, never by both at once."""

    __slots__ = ("_headers", "_receive", "scope")

    def __init__(self, scope: HTTPScope, receive: Receive) -> None:
        self.scope = scope
        self._receive = receive
        self._headers = dict(reversed(cast("Headers", scope["headers"])))  # of several with one name the first counts

    @property
    def method(self) -> str:
        return str(self.scope["method"])

    @property
    def path(self) -> str:
        """Decoded; without the query."""
        return str(self.scope["path"])

    @property
    def query(self) -> dict[str, str]:
        """The URL's parameters; of one that is there twice the last."""
        return dict(parse_qsl(self.scope["query_string"].decode("latin-1"), keep_blank_values=True))

    @property
    def form(self) -> Format:
        """Of the body."""
        return format_of(self.header(b"content-type"))

    @property
    def answer_form(self) -> Format:
        """What the client accepts."""
        return format_of(self.header(b"accept"))

    def header(self, name: bytes) -> bytes | None:
        """The first header of this lower-case name."""
        return self._headers.get(name)

    async def body(self, *, bytes_max: int) -> bytes:
        """The whole body.

        Raises BodyTooLarge as soon as more than `bytes_max` bytes are announced or have come, and Overloaded when the
        bodies of all requests under way are too much.
        """
        announced = self.header(b"content-length")
        if announced is not None and announced.isdigit() and int(announced) > bytes_max:
            raise _too_large(bytes_max)
        bodies = cast("BodyBudget", self.scope["state"][BODIES])
        parts: list[bytes] = []
        size = 0
        try:
            while True:
                message = await self._receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone("the client closed the connection before its request was read")
                part = cast("bytes", message.get("body", b""))
                if size + len(part) > bytes_max:
                    raise _too_large(bytes_max)
                bodies.take(len(part))
                size += len(part)
                parts.append(part)
                if not message.get("more_body", False):
                    return parts[0] if len(parts) == 1 else b"".join(parts)
        finally:
            bodies.give_back(size)

    async def gone(self) -> None:
        """Return when the client has closed the connection."""
        while (await self._receive())["type"] != "http.disconnect":
            pass


def header(scope: MutableMapping[str, Any] | HTTPScope, name: bytes) -> bytes | None:
    """The first header of this lower-case name in an ASGI scope."""
    for key, value in cast("Headers", scope["headers"]):
        if key == name:
            return value
    return None


def written(answer: object, form: Format, *, headers: Headers | None = None) -> Answer:
    """A Struct of an answer in the form that the client accepts."""
    return Answer(encode(answer, form), content_type=CONTENT_TYPES[form], headers=headers or [])


def answer_of(
    error: ApplianceError, *, headers: Headers | None = None, dialect: Dialect = "openai", form: Format = "json"
) -> Answer:
    """An error as the client's SDK reads it."""
    words = cohere_errors.body(error) if dialect == "cohere" else openai_errors.body(error)
    notes = [*openai_errors.headers(error), *(headers or [])]
    return Answer(encode(words, form), status=error.status, content_type=CONTENT_TYPES[form], headers=notes)


def _too_large(bytes_max: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request body is larger than {bytes_max} B; split the request")
