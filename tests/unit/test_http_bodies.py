"""Reading bodies: one is bounded, and so are all that are read at the same time."""

import asyncio
from typing import cast

import pytest
from litestar.types import HTTPReceiveMessage, HTTPScope

from appliance.errors import BodyTooLarge, ClientGone, Overloaded
from appliance.gateway.http import BODIES, BodyBudget, Request


class Client:
    """Sends what it is told to."""

    def __init__(self, bodies: BodyBudget) -> None:
        self._messages: asyncio.Queue[HTTPReceiveMessage] = asyncio.Queue()
        scope = cast("HTTPScope", {"type": "http", "headers": [], "state": {BODIES: bodies}})
        self.request = Request(scope, self._messages.get)

    def send(self, part: bytes, *, is_last: bool = False) -> None:
        self._messages.put_nowait({"type": "http.request", "body": part, "more_body": not is_last})

    def leave(self) -> None:
        self._messages.put_nowait({"type": "http.disconnect"})

    async def read(self) -> bytes:
        return await self.request.body(bytes_max=8)


async def test_bodies_that_come_at_once_are_bounded_together() -> None:
    bodies = BodyBudget(10)
    slow, quick = Client(bodies), Client(bodies)
    slow.send(b"12345678")
    reading = asyncio.create_task(slow.read())
    await asyncio.wait({reading}, timeout=0)

    quick.send(b"123", is_last=True)
    with pytest.raises(Overloaded, match="8 B of requests are being read and the gateway takes 10 B"):
        await quick.read()
    slow.send(b"", is_last=True)
    assert await reading == b"12345678"

    quick.send(b"123", is_last=True)
    assert await quick.read() == b"123"


async def test_every_way_out_gives_its_bytes_back() -> None:
    bodies = BodyBudget(20)
    gone, large, whole = Client(bodies), Client(bodies), Client(bodies)
    gone.send(b"12345678")
    gone.leave()
    with pytest.raises(ClientGone):
        await gone.read()
    large.send(b"12345678")
    large.send(b"9")
    with pytest.raises(BodyTooLarge):
        await large.read()
    whole.send(b"1234")
    whole.send(b"5678", is_last=True)
    assert await whole.read() == b"12345678"

    assert bodies.bytes == 0
