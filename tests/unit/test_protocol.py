"""HTTP on the wire: what is no HTTP, too large or too slow, and upgrades that are not served."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import cast

import pytest
from litestar.types import HTTPRequestEvent, HTTPScope, Receive, Scope, Send

from appliance.gateway import protocol
from appliance.gateway.http import BODIES, Answer, BodyBudget, Request
from appliance.gateway.protocol import HEAD_BYTES_MAX
from tests.http_parts import serving


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the request's body; to /gone only when the client is gone."""
    scope["state"] = {BODIES: BodyBudget(1_000_000)}
    request = Request(cast("HTTPScope", scope), receive)
    body = await request.body(bytes_max=1_000_000)
    if request.path == "/gone":
        await request.gone()
    await Answer(body, content_type=b"text/plain").send(send)


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers before the body has come."""
    event = cast("HTTPRequestEvent", await receive())
    await Answer(b"%d" % len(event["body"]), status=413).send(send)


class Wire:
    """A connection, and what comes back on it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of the next response."""
        async with asyncio.timeout(5):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode().splitlines()
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self._reader.readexactly(int(headers["content-length"]))
        return int(head[0].split()[1]), headers, body

    async def rest(self) -> bytes:
        """All that still comes until the server hangs up."""
        async with asyncio.timeout(5):
            return await self._reader.read()

    async def until(self, end: bytes) -> bytes:
        """What comes up to and with `end`."""
        async with asyncio.timeout(5):
            return await self._reader.readuntil(end)

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
async def served(request: pytest.FixtureRequest) -> AsyncIterator[int]:
    """The port of a server of `echo`, or of the app that the test names."""
    app = getattr(request, "param", echo)
    async with serving(app) as port:
        yield port


@pytest.fixture
async def wire(served: int) -> AsyncIterator[Wire]:
    connection = Wire(*await asyncio.open_connection("127.0.0.1", served))
    yield connection
    connection.close()


def post(body: bytes, *headers: bytes, path: bytes = b"/") -> bytes:
    lines = [b"POST %s HTTP/1.1" % path, b"host: here", b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


H2C = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAAEAAAAIAAAAB")


async def test_an_offered_upgrade_costs_a_request_nothing(wire: Wire) -> None:
    for body in (b"first", b"second"):
        wire.send(post(body, *H2C))
        status, headers, answer = await wire.answer()
        assert (status, answer) == (200, body)
        assert "connection" not in headers
    wire.send(post(b"third"))
    assert (await wire.answer())[2] == b"third"


async def test_a_body_may_come_later_than_the_head_that_offers_an_upgrade(wire: Wire) -> None:
    whole = post(b"0123456789", *H2C)
    for position in range(0, len(whole), 7):
        wire.send(whole[position : position + 7])
        await asyncio.sleep(0)  # a segment of its own
    assert (await wire.answer())[2] == b"0123456789"


async def test_a_chunked_body_behind_an_offered_upgrade(wire: Wire) -> None:
    head = b"\r\n".join([b"POST / HTTP/1.1", b"host: here", b"transfer-encoding: chunked", *H2C])
    wire.send(head + b"\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n")
    assert (await wire.answer())[2] == b"abcde"


async def test_a_request_on_the_heels_of_an_upgrade_ends_the_connection(wire: Wire) -> None:
    wire.send(post(b"first", *H2C) + post(b"second"))
    status, headers, body = await wire.answer()
    assert (status, headers["connection"], body) == (200, "close", b"first")
    assert await wire.rest() == b""


async def test_websockets_are_not_served_and_the_connection_lives(wire: Wire) -> None:
    wire.send(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
    assert (await wire.answer())[0] == 200
    wire.send(post(b"still here"))
    assert (await wire.answer())[2] == b"still here"


@pytest.mark.parametrize(
    "data",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",
        post(b"x", b"content-length: 2"),
        b"POST / HTTP/1.1\r\nhost: here\r\ncontent-length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http_is_told_so_in_shape(wire: Wire, data: bytes) -> None:
    wire.send(data)
    status, headers, body = await wire.answer()
    error = json.loads(body)["error"]
    assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_value")
    assert headers["x-request-id"].startswith("req_")
    assert await wire.rest() == b""


async def test_the_head_may_be_large_but_not_larger(wire: Wire) -> None:
    wire.send(post(b"fits", b"x: " + b"a" * (HEAD_BYTES_MAX // 2)))
    assert (await wire.answer())[2] == b"fits"
    wire.send(b"GET / HTTP/1.1\r\nx: ")
    for _ in range(4):
        wire.send(b"a" * HEAD_BYTES_MAX)
    status, _, body = await wire.answer()
    assert status == 400
    assert "head" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("start", [b"POST", b"POST / HTTP/1.1\r\nhost: here\r\n", post(b"whole")[:-1]])
async def test_a_request_that_does_not_arrive_is_given_up(
    wire: Wire, start: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "REQUEST_READ_S", 0.02)
    wire.send(start)
    status, _, body = await wire.answer()
    assert (status, json.loads(body)["error"]["code"]) == (408, "request_timeout")
    assert await wire.rest() == b""


async def test_a_request_that_has_arrived_may_take_its_time(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "REQUEST_READ_S", 0.02)
    whole = post(b"whole", path=b"/gone")
    wire.send(whole[:-1])
    await asyncio.sleep(0)
    wire.send(whole[-1:])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await wire.rest()


@pytest.mark.slow
async def test_a_connection_without_a_word_is_closed(served: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served)
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()


@pytest.mark.parametrize("served", [refuse], indirect=True)
async def test_an_answer_that_was_given_is_not_given_again(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "REQUEST_READ_S", 0.02)
    wire.send(post(b"0123456789")[:-5])
    assert (await wire.answer())[0] == 413
    assert await wire.rest() == b""


async def stream(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers in pieces of unknown total size; at /bad with a header that would be two."""
    value = b"a\r\nb: c" if scope["path"] == "/bad" else b"a"
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-kind", value)]})
    for piece in (b"one", b"", b"two"):
        await send({"type": "http.response.body", "body": piece, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


@pytest.mark.parametrize("served", [stream], indirect=True)
async def test_an_answer_of_unknown_size_goes_out_in_chunks_and_the_connection_lives(wire: Wire) -> None:
    for _ in range(2):
        wire.send(b"GET / HTTP/1.1\r\nhost: here\r\n\r\n")
        assert await wire.until(b"0\r\n\r\n") == (
            b"HTTP/1.1 200 OK\r\nx-kind: a\r\ntransfer-encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"
        )


@pytest.mark.parametrize("served", [stream], indirect=True)
async def test_a_header_cannot_become_two(wire: Wire) -> None:
    wire.send(b"GET /bad HTTP/1.1\r\nhost: here\r\n\r\n")
    assert b"b: c" not in await wire.rest()


async def test_a_head_is_answered_without_a_body(wire: Wire) -> None:
    wire.send(b"HEAD / HTTP/1.1\r\nhost: here\r\ncontent-length: 2\r\nconnection: close\r\n\r\nhi")
    answer = await wire.rest()
    assert answer.endswith(b"\r\n\r\n")
    assert b"content-length: 2\r\n" in answer


async def test_requests_on_the_heels_of_each_other_are_answered_in_order(wire: Wire) -> None:
    wire.send(post(b"first") + post(b"second") + post(b"third"))
    assert [(await wire.answer())[2] for _ in range(3)] == [b"first", b"second", b"third"]


@pytest.mark.parametrize(
    ("line", "header"), [(b"POST / HTTP/1.0", b"x: y"), (b"POST / HTTP/1.1", b"connection: close")]
)
async def test_a_client_that_wants_no_more_is_hung_up_on(wire: Wire, line: bytes, header: bytes) -> None:
    wire.send(post(b"last", header).replace(b"POST / HTTP/1.1", line))
    _, headers, body = await wire.answer()
    assert (headers["connection"], body) == ("close", b"last")
    assert await wire.rest() == b""


@pytest.mark.slow
async def test_a_connection_in_use_is_not_idle(wire: Wire) -> None:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    while loop.time() - began_s < 1.5:  # longer than the server keeps an idle one
        wire.send(post(b"again"))
        assert (await wire.answer())[2] == b"again"
    assert await wire.rest() == b""


@pytest.mark.parametrize("served", [stream], indirect=True)
async def test_an_answer_of_unknown_size_to_http_1_0_ends_with_the_connection(wire: Wire) -> None:
    wire.send(b"GET / HTTP/1.0\r\n\r\n")
    assert await wire.rest() == b"HTTP/1.1 200 OK\r\nx-kind: a\r\nconnection: close\r\n\r\nonetwo"
