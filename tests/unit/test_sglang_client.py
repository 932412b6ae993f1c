"""The client before a server that misbehaves, the outbox before a node that is slow, the adapter without SGLang."""

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import pytest
from aiohttp import web

from appliance.workers import wire
from appliance.workers.engines.sglang.adapter import EXIT_DONE, EXIT_MALFORMED_FRAME, Adapter
from appliance.workers.engines.sglang.answers import StreamBroken
from appliance.workers.engines.sglang.asking import GenerateRequest, SamplingParams
from appliance.workers.engines.sglang.client import Client, ServerRefused, ServerUnreachable
from appliance.workers.engines.sglang.environment import Environment
from appliance.workers.engines.sglang.outbox import UNSENT_MAX, Outbox
from appliance.workers.wire import Begin, Encode, Fault, FromEngine, Grown, Load, Step, Stop, ToEngine

REQUEST = GenerateRequest("r", (1,), SamplingParams(1, 0.0), stream=True)
EVENT = b'data: {"output_ids":[7]}\n\n'

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def client_of(answer: Answer) -> AsyncIterator[Client]:
    """Of a server that answers everything so."""
    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        async with Client(_url(runner), key="secret") as client:
            yield client
    finally:
        await runner.cleanup()


def _url(runner: web.AppRunner) -> str:
    host, port = runner.addresses[0][:2]
    return f"http://{host}:{port}"


def streaming(*chunks: bytes) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        return response

    return answer


def saying(status: int, text: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.headers["authorization"] == "Bearer secret"
        return web.Response(status=status, text=text)

    return answer


async def ids_of(client: Client) -> list[int]:
    async with aclosing(client.generate(REQUEST)) as events:
        return [token async for event in events for token in event.output_ids]


async def test_a_whole_stream_is_read() -> None:
    async with client_of(streaming(EVENT[:9], EVENT[9:] + EVENT, b"data: [DONE]\n\n")) as client:
        assert await ids_of(client) == [7, 7]


@pytest.mark.parametrize("chunks", [(), (EVENT,), (EVENT, b"data: {]\n\n")])
async def test_a_stream_that_ends_early_is_never_taken_for_whole(chunks: tuple[bytes, ...]) -> None:
    async with client_of(streaming(*chunks)) as client:
        with pytest.raises(StreamBroken):
            await ids_of(client)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('{"error":{"message":"too long"}}', "too long"),
        ('{"error":"Unauthorized"}', "Unauthorized"),
        ('{"success":false,"error_message":"no such adapter"}', "no such adapter"),
        ("<html>", "<html>"),
        ("[]", "[]"),
        ("{}", ""),
    ],
)
async def test_a_refusal_is_passed_on_in_its_words(body: str, words: str) -> None:
    async with client_of(saying(400, body)) as client:
        with pytest.raises(ServerRefused) as caught:
            await ids_of(client)

    assert (caught.value.status, str(caught.value)) == (400, words)


async def test_an_answer_of_another_shape_and_none_at_all() -> None:
    async with client_of(saying(200, '{"version":5}')) as client:
        assert await client.is_healthy()
        with pytest.raises(StreamBroken):
            await client.info()
    async with Client("http://127.0.0.1:1", key="secret") as client:
        assert not await client.is_healthy()
        with pytest.raises(ServerUnreachable):
            await client.abort("r")


class Node:
    """The other end of an adapter's connection."""

    def __init__(self) -> None:
        self._mine, theirs = socket.socketpair()
        self._theirs = theirs

    async def __aenter__(self) -> "Node":
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self._mine)
        self.engine_reader, self.engine_writer = await asyncio.open_unix_connection(sock=self._theirs)
        return self

    async def __aexit__(self, *_: object) -> None:
        for writer in (self.writer, self.engine_writer):
            writer.close()
            await writer.wait_closed()

    def send(self, order: ToEngine) -> None:
        self.writer.write(wire.frame(order))

    async def receive(self) -> FromEngine:
        header = await self.reader.readexactly(wire.LENGTH_BYTES)
        return wire.decode_from_engine(await self.reader.readexactly(wire.body_length(header)))

    def adapter(self, folder: Path) -> Adapter:
        return Adapter(self.engine_reader, self.engine_writer, environment=Environment(folder), threads=1)


async def test_without_sglang_a_load_says_what_to_do(tmp_path: Path) -> None:
    async with Node() as node, asyncio.timeout(10):
        serving = asyncio.create_task(node.adapter(tmp_path).serve())
        node.send(Load("m", "/nowhere", "float32", "cpu", 1, task="generate"))
        answer = await node.receive()
        node.send(Begin(4, "m", b"\0\0\0\0", 1))
        step = await node.receive()
        node.send(Stop())

        assert await serving == EXIT_DONE

    assert isinstance(answer, Fault)
    assert (answer.batch, answer.code, "appliance engines install sglang" in answer.message) == (-1, "invalid", True)
    assert isinstance(step, Step)
    assert step.grown == (Grown(4, finish="fault", fault="the model is not loaded"),)


@pytest.mark.parametrize("frame", [wire.frame(Encode(1, "m", b"", ())), b"\0\0\0\1\xc1", b"\xff\xff\xff\xff"])
async def test_a_frame_it_cannot_serve_ends_it(tmp_path: Path, frame: bytes) -> None:
    async with Node() as node, asyncio.timeout(10):
        node.writer.write(frame)
        assert await node.adapter(tmp_path).serve() == EXIT_MALFORMED_FRAME


async def test_a_node_that_is_gone_ends_it(tmp_path: Path) -> None:
    async with Node() as node, asyncio.timeout(10):
        node.writer.close()
        assert await node.adapter(tmp_path).serve() == EXIT_DONE


async def test_what_came_together_leaves_together_and_is_bounded() -> None:
    async with Node() as node, asyncio.timeout(10):
        outbox = Outbox(node.engine_writer)
        outbox.begun(1)
        outbox.begun(2)
        for number in range(UNSENT_MAX - 1):
            await outbox.put(Grown(1, (number,)))
        await outbox.put(Grown(2, (5,), finish="stop"))
        blocked = asyncio.create_task(outbox.put(Grown(1, (6,))))
        await asyncio.sleep(0)
        assert not blocked.done()

        sending = asyncio.create_task(outbox.run())
        first, second = await node.receive(), await node.receive()
        sending.cancel()
        await asyncio.wait({sending, blocked})

    assert isinstance(first, Step)
    assert isinstance(second, Step)
    assert (len(first.grown), first.running, first.waiting) == (UNSENT_MAX, 1, 0)
    assert second.grown == (Grown(1, (6,)),)


async def test_nothing_is_said_of_what_was_forgotten() -> None:
    async with Node() as node, asyncio.timeout(10):
        outbox = Outbox(node.engine_writer)
        await outbox.put(Grown(1, (1,)))
        await outbox.put(Grown(2, (2,)))
        outbox.forget([1, 99])
        sending = asyncio.create_task(outbox.run())
        step = await node.receive()
        sending.cancel()
        await asyncio.wait({sending})

    assert isinstance(step, Step)
    assert (step.grown, step.running) == ((Grown(2, (2,)),), 1)
