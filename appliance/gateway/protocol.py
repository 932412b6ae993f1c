"""HTTP/1.1 on one connection: uvicorn's protocol, with the bounds and the manners that it lacks, at less CPU.

- A head has a largest size, and a request a longest time to arrive in: a client that dribbles holds no connection.
- A connection on which nothing is ever said is closed like one on which nothing is said any more.
- What is no HTTP is answered in the API's own shape.
- An upgrade that is not served is ignored, as RFC 9110 (7.8) has it. JDK clients offer h2c with every first request;
  the parser takes that for the end of the request and would lose its body.
"""

import asyncio
import secrets
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from appliance import telemetry
from appliance.errors import ApplianceError, InvalidRequest, RequestTooSlow
from appliance.gateway.http import answer_of

HEAD_BYTES_MAX = 64 * 1024
REQUEST_READ_S = 60.0
READ_S_MAX = 60.0  # of a client that does not take what is written to it

_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class BoundedProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # `Any`: uvicorn's own
        super().__init__(*arguments, **options)
        self._is_receiving = False
        self._is_in_head = False
        self._head_bytes = 0
        self._read_deadline: asyncio.TimerHandle | None = None
        self._active_s = self.loop.time()  # when something was last read or answered

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self._close_when_idle_for(self.timeout_keep_alive)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._unset_read_deadline()

    def data_received(self, data: bytes) -> None:
        self._active_s = self.loop.time()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[cast("int", upgrade.args[0]) :])
        except httptools.HttpParserError:
            self._refuse(InvalidRequest("the request is not well-formed HTTP/1.1"))
            return
        if self._is_receiving:
            self._bound(len(data))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_receiving = self._is_in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        version = self.parser.get_http_version()
        scope = self.scope
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = version
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = url.path
        scope["query_string"] = url.query or b""
        earlier: RequestResponseCycle | None = self.cycle
        self.cycle = _Exchange(
            scope=scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.server_state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        if earlier is None or earlier.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:  # a request on the heels of another
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():  # the parser stops behind the head; the body may be still to come
            return
        self._is_receiving = False
        self._unset_read_deadline()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._active_s = self.loop.time()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())

    def timeout_keep_alive_handler(self) -> None:
        """Hang up if nothing has happened for long enough, else look again when that may be so.

        One timer a connection, where uvicorn starts one with each answer and stops it with each request.
        """
        last: RequestResponseCycle | None = self.cycle
        is_busy = self._is_receiving or (last is not None and not last.response_complete)
        idle_s = 0.0 if is_busy else self.loop.time() - self._active_s
        if idle_s < self.timeout_keep_alive:
            self._close_when_idle_for(self.timeout_keep_alive - idle_s)
        else:
            self.transport.close()

    def _close_when_idle_for(self, wait_s: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(wait_s, self.timeout_keep_alive_handler)

    def renew_parser(self, events: object | None = None) -> None:
        """Read on with a fresh parser, which expects a new request."""
        self.parser = httptools.HttpRequestParser(self if events is None else events)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn sets up its own

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the body that the parser left, with a parser whose own head says no more than how the body is framed."""
        framing = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name in _FRAMING]
        self.renew_parser(_BodyOnly(self))
        self.data_received(b"".join([b"POST / HTTP/1.1\r\n", *framing, b"\r\n", rest]))

    def _bound(self, received_bytes: int) -> None:
        if self._is_in_head:
            self._head_bytes += received_bytes
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(InvalidRequest(f"the head of the request is larger than {HEAD_BYTES_MAX} B"))
                return
        if self._read_deadline is None:
            self._read_deadline = self.loop.call_later(REQUEST_READ_S, self._on_read_deadline)

    def _on_read_deadline(self) -> None:
        self._read_deadline = None
        if self.flow.read_paused:  # it is we who do not read, being busy with an earlier request
            self._bound(0)
        else:
            self._refuse(RequestTooSlow(f"the request did not arrive within {REQUEST_READ_S:g} s; send less at once"))

    @property
    def _owes_an_answer(self) -> bool:
        """Whether what is written now is the answer to what was read last, and not to an earlier request."""
        if self.cycle is None:
            return True
        return self.cycle.response_complete != self.cycle.more_body and (
            self.cycle.response_complete or not self.cycle.response_started
        )

    def _unset_read_deadline(self) -> None:
        if self._read_deadline is not None:
            self._read_deadline.cancel()
            self._read_deadline = None

    def _refuse(self, error: ApplianceError) -> None:
        """Answer outside of any endpoint, unless an answer is on its way already, and hang up."""
        self._is_receiving = False
        self._unset_read_deadline()
        if self.transport.is_closing():
            return
        if self._owes_an_answer:
            self.transport.write(_response(error, default_headers=self.server_state.default_headers))
            telemetry.REQUESTS.labels("other", str(error.status)).inc()
        self.transport.close()


class _Exchange(RequestResponseCycle):
    """One request and its answer, the head of which goes out together with the first of its body."""

    _head = b""

    async def send(self, message: Any) -> None:  # `Any`: uvicorn's types of it are private
        """ASGI's `send`."""
        if self.flow.write_paused and not self.disconnected:
            await self._drained()
        if self.disconnected:
            return
        if self.response_complete:
            raise RuntimeError("something was sent after the answer was complete")
        if not self.response_started:
            self._begin(message)
        else:
            self._go_on(message.get("body", b""), is_last=not message.get("more_body", False))

    async def _drained(self) -> None:
        """Wait until the client has taken what was written. One that takes nothing is hung up on."""
        try:
            async with asyncio.timeout(READ_S_MAX):
                await self.flow.drain()
        except TimeoutError:
            self.transport.abort()
            self.disconnected = True
            self.message_event.set()

    def _begin(self, message: Any) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        status = message["status"]
        lines = [STATUS_LINE[status]]
        is_sized = False
        for name, value in (*self.default_headers, *message.get("headers", ())):
            lines.append(b"%s: %s\r\n" % (name, value))
            if name == b"content-length":
                is_sized = True
            elif name == b"connection" and b"close" in value.lower():
                self.keep_alive = False
        if not self.keep_alive:
            lines.append(b"connection: close\r\n")
        has_body = self.scope["method"] != "HEAD" and status not in {204, 304}
        # HTTP/1.0 knows no chunks: there the end of the connection is the end of the body.
        self.chunked_encoding = not is_sized and has_body and self.scope["http_version"] != "1.0"
        if self.chunked_encoding:
            lines.append(b"transfer-encoding: chunked\r\n")
        self._head = b"".join(lines)
        if self._head.count(b"\n") != len(lines) or self._head.count(b"\r") != len(lines):
            raise RuntimeError("a header of the answer holds a line break")
        self._head += b"\r\n"

    def _go_on(self, body: bytes, *, is_last: bool) -> None:
        if self.scope["method"] == "HEAD":
            body = b""
        elif self.chunked_encoding:
            body = b"%x\r\n%s\r\n" % (len(body), body) if body else b""
            body += b"0\r\n\r\n" if is_last else b""
        self.transport.writelines((self._head, body) if self._head else (body,))
        self._head = b""
        if is_last:
            self.response_complete = True
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()


class _BodyOnly:
    """What a parser says that begins with a head of our own making: only the body and its end are news."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        self._protocol = protocol
        self._is_complete = False

    def on_message_begin(self) -> None:
        """Ours; or one that was sent on the heels of the first, which the end of this connection refuses."""
        if self._is_complete:
            self._protocol.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if not self._is_complete:
            self._protocol.on_body(body)

    def on_message_complete(self) -> None:
        """Its end; the next request is read as usual."""
        if not self._is_complete:
            self._is_complete = True
            self._protocol.on_message_complete()
            self._protocol.renew_parser()


def _response(error: ApplianceError, *, default_headers: list[tuple[bytes, bytes]]) -> bytes:
    answer = answer_of(error)
    headers = [
        *default_headers,
        (b"content-type", answer.content_type),
        (b"content-length", b"%d" % len(answer.body)),
        (b"x-request-id", b"req_" + secrets.token_hex(16).encode()),
        (b"connection", b"close"),
        *answer.headers,
    ]
    lines = [b"%s: %s\r\n" % header for header in headers]
    return b"".join([STATUS_LINE[answer.status], *lines, b"\r\n", answer.body])
