"""An ASGI app behind our HTTP protocol on a port of its own, without an appliance around it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from appliance.gateway.protocol import BoundedProtocol


@asynccontextmanager
async def serving(app: Any, *, keep_alive_s: int = 1) -> AsyncIterator[int]:  # `Any`: an app of either ASGI types
    """The port. At the end open connections are closed and what they asked for is awaited."""
    config = uvicorn.Config(
        app, http=BoundedProtocol, ws="none", lifespan="off", log_config=None, timeout_keep_alive=keep_alive_s
    )
    config.load()
    state = ServerState()
    server = await asyncio.get_running_loop().create_server(
        lambda: BoundedProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with server:
        yield int(server.sockets[0].getsockname()[1])
        for connection in list(state.connections):
            connection.shutdown()
        await asyncio.gather(*state.tasks)
