"""The load test's HTTP client against a server that sends exactly these bytes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from appliance.bench.http import Address, Connections, Unanswered
from appliance.errors import StartupError
from tests.appliance_process import free_port


class Scripted:
    """Answers the n-th request with the n-th script; an empty one hangs up. Counts connections."""

    def __init__(self, scripts: Sequence[bytes | None]) -> None:
        self.scripts = iter(scripts)
        self.connections = 0
        self.requests: list[bytes] = []
        self.heard = asyncio.Event()
        self.over = asyncio.Event()
        self.port = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.requests.append(head + await reader.readexactly(4))
                self.heard.set()
                script = next(self.scripts)
                if script is None:
                    await reader.read()  # no answer, until the client is gone
                    return
                if not script:
                    return
                writer.write(script)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.over.set()
            writer.close()


@asynccontextmanager
async def served(*scripts: bytes | None) -> AsyncIterator[tuple[Scripted, Connections, bytes]]:
    script = Scripted(scripts)
    server = await asyncio.start_server(script.connected, "127.0.0.1", 0)
    script.port = server.sockets[0].getsockname()[1]
    try:
        async with Connections(Address.of(f"http://127.0.0.1:{script.port}/v1/")) as connections:
            yield script, connections, connections.post("/embeddings", b"body", key="secret")
    finally:
        server.close()


OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi"


async def test_a_connection_is_reused_and_the_request_is_whole() -> None:
    async with served(OK, OK) as (script, connections, request):
        for _ in range(2):
            answer = await connections.send(request)
            assert (answer.status, answer.body) == (200, b"hi")

        assert script.connections == 1
        (head,) = set(script.requests)
        assert head.startswith(b"POST /v1/embeddings HTTP/1.1\r\n")
        assert head.endswith(b"\r\n\r\nbody")
        assert b"authorization: Bearer secret\r\n" in head
        assert b"content-length: 4\r\n" in head


@pytest.mark.parametrize(
    ("script", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", 200, b"abc"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
        (b"HTTP/1.1 103 Early Hints\r\n\r\n" + OK, 200, b"hi"),
        (b"HTTP/1.1 503 Busy\r\ncontent-length: 0\r\nretry-after: 1\r\n\r\n", 503, b""),
    ],
)
async def test_answers_in_every_framing(script: bytes, status: int, body: bytes) -> None:
    async with served(script, OK) as (_, connections, request):
        answer = await connections.send(request)

        assert (answer.status, answer.body) == (status, body)
        assert (await connections.send(request)).body == b"hi"


async def test_a_server_that_closes_after_its_answer_is_dialled_again() -> None:
    closing = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\nhi"
    async with served(closing, OK) as (script, connections, request):
        assert (await connections.send(request)).body == b"hi"
        assert (await connections.send(request)).body == b"hi"
        assert script.connections == 2


@pytest.mark.parametrize("script", [b"", b"SSH-2.0-OpenSSH\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n"])
async def test_what_is_no_answer_is_said(script: bytes) -> None:
    async with served(script, OK) as (_, connections, request):
        with pytest.raises(Unanswered):
            await connections.send(request)
        assert (await connections.send(request)).body == b"hi"


async def test_a_cancelled_request_takes_its_connection_along() -> None:
    async with served(None, OK) as (script, connections, request):
        sending = asyncio.create_task(connections.send(request))
        await asyncio.wait_for(script.heard.wait(), 5)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending

        await asyncio.wait_for(script.over.wait(), 5)
        assert (await connections.send(request)).body == b"hi"
        assert script.connections == 2


async def test_nobody_there_is_said() -> None:
    async with Connections(Address.of(f"http://127.0.0.1:{free_port()}")) as connections:
        with pytest.raises(Unanswered, match="no connection"):
            await connections.send(connections.post("/embeddings", b"", key=None))


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://host", Address("host", 80, False, "")),
        ("https://host/v1/", Address("host", 443, True, "/v1")),
        ("http://[::1]:9000/v1", Address("::1", 9000, False, "/v1")),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert Address.of(url) == address


@pytest.mark.parametrize("url", ["", "host:8080", "ftp://host", "http://", "http://host:port", "http://host:70000"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(StartupError, match="http://host:8080/v1"):
        Address.of(url)
