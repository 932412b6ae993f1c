"""The only way to SGLang's HTTP server: a closed list of its endpoints.

SGLang serves dozens of endpoints, among them some that load weights, write files or unpickle. `_open` is the one place
that makes a request, and refuses every path that is not in `ENDPOINTS`.

aiohttp, for its parser in C and for closing a connection when a task is cancelled: a stream is one event a token.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import msgspec

from appliance.workers.engines.sglang.answers import Event, EventLines, StreamBroken, decode_event
from appliance.workers.engines.sglang.asking import GenerateRequest

ENDPOINTS: Final = frozenset(
    {
        ("GET", "/health"),
        ("GET", "/server_info"),
        ("POST", "/generate"),
        ("POST", "/abort_request"),
        ("POST", "/load_lora_adapter"),
        ("POST", "/unload_lora_adapter"),
    }
)
_ASK_TIMEOUT_S: Final = 30.0
_ADAPTER_TIMEOUT_S: Final = 120.0
_BODY_BYTES_MAX: Final = 4 * 1024 * 1024


class ServerRefused(Exception):
    """SGLang answered with an error. `status` is HTTP's."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerUnreachable(Exception):
    """No answer: it is not up yet, or gone."""


class _InternalState(msgspec.Struct, frozen=True):
    memory_usage: dict[str, Any] = {}  # numbers in GiB, and tables of them
    effective_max_running_requests_per_dp: int | None = None


class ServerInfo(msgspec.Struct, frozen=True):
    """What `/server_info` says, as far as it is read."""

    version: str
    max_total_num_tokens: int
    max_req_input_len: int
    dtype: str = ""
    dp_size: int = 1
    trust_remote_code: bool = True  # what is not said is not believed
    enable_custom_logit_processor: bool = True
    enable_lora: bool | None = None
    max_lora_rank: int | None = None
    max_loaded_loras: int | None = None
    max_loras_per_batch: int = 0
    internal_states: tuple[_InternalState, ...] = ()


class _Error(msgspec.Struct, frozen=True):
    error: Any = None  # a string, or a table with a `message`
    error_message: str | None = None  # of adapters
    message: str | None = None


_json = msgspec.json.Encoder()


class Client:
    """Of one server. An async context manager; use from one event loop."""

    def __init__(self, url: str, *, key: str) -> None:
        self._url = url
        self._key = key
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(
            headers={"authorization": f"Bearer {self._key}", "content-type": "application/json"},
            connector=aiohttp.TCPConnector(limit=0),  # the adapter bounds what is outstanding
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_ASK_TIMEOUT_S),
            trust_env=False,
            auto_decompress=True,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._session is not None
        await self._session.close()

    async def is_healthy(self) -> bool:
        """Whether it is up. Never raises for a server that is not."""
        try:
            await self._ask("GET", "/health", timeout_s=5.0)
        except (ServerRefused, ServerUnreachable):
            return False
        return True

    async def info(self) -> ServerInfo:
        """What runs there. Raises ServerRefused, ServerUnreachable, or StreamBroken for what cannot be read."""
        body = await self._ask("GET", "/server_info", timeout_s=_ASK_TIMEOUT_S)
        try:
            return msgspec.json.decode(body, type=ServerInfo)
        except msgspec.DecodeError as exc:
            raise StreamBroken(f"/server_info cannot be read: {exc}") from exc

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Event]:
        """The events of one request, to its end. Raises like `info`, and StreamBroken for one that ends early."""
        lines = EventLines()
        async with self._answer("POST", "/generate", _json.encode(request), timeout_s=None) as response:
            async for chunk in response.content.iter_any():
                for data in lines.feed(chunk):
                    yield decode_event(data)
                if lines.is_done:
                    return
        raise StreamBroken("the stream ended early")

    async def abort(self, rid: str) -> None:
        """Have a request end. One that is not known there is no error. Raises ServerRefused, ServerUnreachable."""
        await self._ask("POST", "/abort_request", _json.encode({"rid": rid}), timeout_s=_ASK_TIMEOUT_S)

    async def load_lora(self, name: str, folder: str) -> None:
        """Have an adapter loaded. Raises like `abort`."""
        body = _json.encode({"lora_name": name, "lora_path": folder})
        await self._ask("POST", "/load_lora_adapter", body, timeout_s=_ADAPTER_TIMEOUT_S)

    async def unload_lora(self, name: str) -> None:
        """Have an adapter forgotten, after the requests that use it. Raises like `abort`."""
        body = _json.encode({"lora_name": name})
        await self._ask("POST", "/unload_lora_adapter", body, timeout_s=_ADAPTER_TIMEOUT_S)

    async def _ask(self, method: str, path: str, body: bytes | None = None, *, timeout_s: float) -> bytes:
        async with self._answer(method, path, body, timeout_s=timeout_s) as response:
            return await _bounded(response)

    @contextlib.asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: bytes | None, *, timeout_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200, whose body is still to be read. The library's errors, there too, become ours."""
        try:
            async with asyncio.timeout(timeout_s), self._open(method, path, body) as response:
                if response.status != 200:
                    raise ServerRefused(_words(await _bounded(response)), status=response.status)
                yield response
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as exc:
            raise ServerUnreachable(f"{path}: {type(exc).__name__} {exc}") from exc

    def _open(self, method: str, path: str, body: bytes | None) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """Raises ValueError for an endpoint that is not in the list."""
        if (method, path) not in ENDPOINTS:
            raise ValueError(f"{method} {path} of SGLang is never called")
        assert self._session is not None, "enter the client first"
        return self._session.request(method, self._url + path, data=body, allow_redirects=False)


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """All of a body. Raises StreamBroken for one that is too long."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > _BODY_BYTES_MAX:
            raise StreamBroken(f"an answer is over {_BODY_BYTES_MAX} B")
    return bytes(body)


def _words(body: bytes) -> str:
    """The message in an error's body."""
    try:
        error = msgspec.json.decode(body, type=_Error)
    except msgspec.DecodeError:
        return body[:200].decode(errors="replace")
    nested = error.error.get("message") if isinstance(error.error, dict) else error.error
    return str(nested or error.error_message or error.message or "")
