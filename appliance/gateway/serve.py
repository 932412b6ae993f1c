"""The gateway process: queue, dispatcher, canary and HTTP server, from first to last."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from appliance.catalog import Catalog
from appliance.errors import StartupError
from appliance.gateway.address import address_of
from appliance.gateway.app import build_app
from appliance.gateway.dispatch import Dispatcher
from appliance.gateway.health import Canary
from appliance.gateway.protocol import BoundedProtocol
from appliance.queue.base import GatewayListener, GatewayQueue
from appliance.settings import Settings

BACKLOG = 2048
GOOD_BYE_S = 0.5  # of the drain: for the answers to those who cannot be waited for
KEEP_ALIVE_S = 75  # longer than the pools of the SDKs keep a connection idle, so that they never meet a closed one

_log = logging.getLogger(__name__)


async def serve_gateway(
    settings: Settings,
    *,
    catalog: Catalog,
    queue_of: Callable[[GatewayListener], contextlib.AbstractAsyncContextManager[GatewayQueue]],
) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests in flight for at most `drain_s`."""
    dispatcher = Dispatcher(
        pending_requests_max=settings.gateway.pending_requests_max,
        pending_bytes_max=settings.gateway.pending_bytes_max,
    )
    canary = Canary(
        dispatcher,
        catalog.tasks(),
        interval_s=settings.gateway.canary_interval_s,
        outputs=catalog.outputs(),
    )
    dispatcher.on_alive(canary.prove, elsewhere=canary.hear)
    app = build_app(settings, catalog=catalog, dispatcher=dispatcher, canary=canary)
    server = server_of(app, drain_s=settings.gateway.drain_s, give_up=dispatcher.give_up)
    _exit_on_signals(server)
    with _listen(settings.gateway.host, settings.gateway.port, is_shared=settings.gateway.processes > 1) as listener:
        async with queue_of(dispatcher) as queue:
            dispatcher.attach(queue)
            try:
                async with asyncio.TaskGroup() as group:
                    watching = group.create_task(canary.run())
                    await server.serve(sockets=[listener])
                    watching.cancel()
            finally:
                await dispatcher.close()


def server_of(app: object, *, drain_s: float, give_up: Callable[[], None]) -> uvicorn.Server:
    """uvicorn's, on our protocol. `give_up` fails the requests that it would otherwise cut off: they get an answer."""
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # litestar's and uvicorn's ASGI types differ in name only
        loop="uvloop",
        http=BoundedProtocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=True,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(drain_s)),
        backlog=BACKLOG,
    )
    return _Server(config, give_up=give_up)


class _Server(uvicorn.Server):
    """Says good-bye before it hangs up."""

    def __init__(self, config: uvicorn.Config, *, give_up: Callable[[], None]) -> None:
        super().__init__(config)
        self._give_up = give_up

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the requests in flight; a little before the wait is over, fail them."""
        wait_s = (self.config.timeout_graceful_shutdown or 0) - GOOD_BYE_S
        giving_up = asyncio.get_running_loop().call_later(wait_s, self._give_up)
        try:
            await super().shutdown(sockets)
        finally:
            giving_up.cancel()


def _exit_on_signals(server: uvicorn.Server) -> None:
    """Stop in order also on a signal that comes before the server serves.

    While it serves it has handlers of its own, and raises what it caught once more when it is done: into these.
    """

    def exit_soon(number: int, frame: FrameType | None) -> None:
        server.should_exit = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, exit_soon)


def _listen(host: str, port: int, *, is_shared: bool) -> socket.socket:
    """A listening socket; a shared one can be opened by several gateway processes of this machine."""
    family, address = address_of(host, port)
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartupError(
            f"gateway.port {port} on {host} cannot be used: {error.strerror}; "
            "stop what holds it or set APPLIANCE_PORT to another port"
        ) from error
    listener.setblocking(False)
    return listener
