"""What a connection to NATS does when its socket is gone; tests/contract runs it on a real server."""

import asyncio

import pytest

from appliance.errors import QueueUnavailable
from appliance.queue.jetstream import NatsConnection


class ClosedSocket:
    """A transport as nats-py holds it, whose socket is gone."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def writelines(self, payload: list[bytes]) -> None:
        """What uvloop (RuntimeError) or asyncio (OSError) says of a closed one."""
        raise self.error


@pytest.mark.parametrize("error", [RuntimeError("the handler is closed"), ConnectionResetError()])
async def test_an_end_with_something_unsent_on_a_closed_socket_is_an_end(error: Exception) -> None:
    connection = NatsConnection(role="node", needs_tls=False)
    connection._flush_queue = asyncio.Queue()
    connection._current_server = object()
    connection._transport = ClosedSocket(error)
    connection._pending = [b"unsent"]
    connection._pending_data_size = 6
    answer: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    connection._calls[b"inbox"] = answer  # type: ignore[assignment]

    await connection._close(NatsConnection.CLOSED)

    assert connection.lost.is_set()
    with pytest.raises(QueueUnavailable):
        await answer
