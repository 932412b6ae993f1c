"""Endpoints that write texts, in any dialect: whole answers, or streams of them.

A stream begins when its first part is there: what is refused before that is refused with a status of its own.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack

import msgspec

from appliance import telemetry
from appliance.catalog import Route
from appliance.compat.bodies import why
from appliance.compat.formats import Format
from appliance.compat.generation import Gathering, Generated, GenerationCall, Names, StreamWriter, in_names
from appliance.errors import (
    ApplianceError,
    ClientGone,
    DeadlinePassed,
    InternalError,
    InvalidRequest,
    MalformedBody,
)
from appliance.gateway.calls import Calls, deadline_after_s, notes
from appliance.gateway.endpoints import AnyAnswer, Endpoint, internal_error
from appliance.gateway.http import Request, StreamedAnswer, written
from appliance.gateway.operation import ServeNamed
from appliance.gateway.pending_calls import Piece, Result
from appliance.jobs import Delta, Done, Usage

PING = b": ping\n\n"

Decode = Callable[[bytes], GenerationCall]

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_log = logging.getLogger(__name__)


class Generation:
    """All of them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def endpoint(self, decode: Decode, names: Names = (), *, is_slow: bool = False) -> Endpoint:
        """The endpoint of a dialect; `names` are its own for what a node may find fault with.

        `is_slow`: bodies may take seconds to decode, which happens on a thread then.
        """

        async def post(request: Request) -> AnyAnswer:
            call = await _decoded(decode, await self._json(request), is_slow=is_slow)
            route = self._calls.route(call.model, "generate")
            try:
                return await self._answer(request, call, route)
            except InvalidRequest as error:
                raise in_names(error, names) from error

        return post

    def deployment(self, decode: Decode, *, is_slow: bool = False) -> ServeNamed:
        """The same at Azure's path, which names the model."""

        async def post(request: Request, name: str) -> AnyAnswer:
            call = await _decoded(decode, _naming(name, await self._json(request)), is_slow=is_slow)
            return await self._answer(request, call, self._calls.route(name, "generate"))

        return post

    async def _json(self, request: Request) -> bytes:
        return as_json(await self._calls.body(request), request.form)

    async def _answer(self, request: Request, call: GenerationCall, route: Route) -> AnyAnswer:
        created_s = int(time.time())
        name = call.model or route.name
        headers = notes(ignored=call.ignored)
        if call.is_streamed:
            writer = call.writer(model=name, created_s=created_s)
            return await self._streamed(request, call, route, writer, notes=headers)
        within_s = deadline_after_s(request, timeout_s_max=self._calls.gateway.text_timeout_s)
        results = await self._calls.run_each(request, route.model, call.tasks, within_s=within_s)
        answer = call.answer([_gathered(result) for result in results], model=name, created_s=created_s)
        return written(answer, request.answer_form, headers=headers)

    async def _streamed(
        self,
        request: Request,
        call: GenerationCall,
        route: Route,
        writer: StreamWriter,
        *,
        notes: list[tuple[bytes, bytes]],
    ) -> StreamedAnswer:
        started_s = time.perf_counter()
        gateway = self._calls.gateway
        async with AsyncExitStack() as stack:
            pieces = await stack.enter_async_context(
                self._calls.stream(request, route.model, call.tasks, within_s=gateway.text_timeout_s)
            )
            within_s = deadline_after_s(request, timeout_s_max=gateway.request_timeout_s)
            first = await _first(pieces, within_s=within_s)
            telemetry.FIRST_TOKEN_SECONDS.labels(route.model).observe(time.perf_counter() - started_s)
            parts = self._parts(route.model, writer, first, pieces)
            stack.push_async_callback(parts.aclose)
            close = stack.pop_all().aclose
        return StreamedAnswer(parts, content_type=writer.content_type, headers=notes, close=close)

    async def _parts(
        self, model: str, writer: StreamWriter, first: Piece, pieces: AsyncIterator[Piece | None]
    ) -> AsyncGenerator[bytes, None]:
        """The stream in the client's dialect; what goes wrong now can only be told within it."""
        usages: list[Usage] = []
        begun_s = time.perf_counter()
        broken = telemetry.BROKEN_STREAMS
        try:
            self._calls.prove(model)
            yield writer.start()
            yield _written(writer, first, usages)
            async for piece in pieces:
                if piece is not None:
                    self._calls.prove(model)  # texts may hold all places for longer than a canary waits
                    yield _written(writer, piece, usages)
                elif writer.takes_pings:
                    yield PING
            self._calls.answered(model, usages)
            _observe_pace(model, usages, time.perf_counter() - begun_s)
            yield writer.end()
        except ClientGone as error:
            broken.labels(model, error.code).inc()
        except ApplianceError as error:
            _log.warning("a text of %s broke off: %s (%s)", model, error.message, error.code)
            broken.labels(model, error.code).inc()
            yield writer.error(error)
        except Exception:
            # A bug. The client hears that the text is not complete, the log has the traceback.
            _log.exception("a text of %s broke off", model)
            broken.labels(model, InternalError.code).inc()
            yield writer.error(internal_error())


async def _decoded(decode: Decode, body: bytes, *, is_slow: bool) -> GenerationCall:
    return await asyncio.to_thread(decode, body) if is_slow else decode(body)


async def _first(pieces: AsyncIterator[Piece | None], *, within_s: float) -> Piece:
    """The first piece of a stream; raises the error of a call that fails before it."""
    try:
        async with asyncio.timeout(within_s):
            piece = await anext(pieces)
            while piece is None:
                piece = await anext(pieces)
    except TimeoutError as exc:
        raise DeadlinePassed(f"the text did not begin within {within_s:g} s; try again later") from exc
    return piece


def _naming(model: str, body: bytes) -> bytes:
    """A JSON body in which the path's model stands for whatever its own field says, which may be absent."""
    try:
        fields = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body  # whoever reads it says what is wrong with it
    return msgspec.json.encode({**fields, "model": model})


def as_json(body: bytes, form: Format) -> bytes:
    """The body of a request as JSON, in which messages and schemas travel on. Raises MalformedBody."""
    if form == "json":
        return body
    try:
        found = msgspec.msgpack.decode(body)
        if not _is_json(found):
            raise MalformedBody("the request body holds what JSON has not: bytes, a date, no number, or a key of these")
        return msgspec.json.encode(found)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise MalformedBody(f"the request body is not valid msgpack: {why(exc)}") from exc


def _is_json(found: object) -> bool:
    """Whether JSON says the same: msgspec would write bytes as text and NaN as null."""
    waiting = [found]
    while waiting:
        match waiting.pop():
            case dict() as members:
                if not all(isinstance(key, str) for key in members):
                    return False
                waiting += members.values()
            case list() as items:
                waiting += items
            case float() as number if not math.isfinite(number):
                return False
            case None | bool() | int() | float() | str():
                pass
            case _:
                return False
    return True


def _observe_pace(model: str, usages: Sequence[Usage], lasted_s: float) -> None:
    tokens = max((usage.output_tokens for usage in usages), default=0)  # texts of one call are written side by side
    if tokens > 1:
        telemetry.LATER_TOKEN_SECONDS.labels(model).observe(lasted_s / (tokens - 1))


def _written(writer: StreamWriter, piece: Piece, usages: list[Usage]) -> bytes:
    match piece.event:
        case Delta() as delta:
            return writer.delta(piece.position, delta)
        case Done() as done:
            usages.append(done.usage)
            return writer.finish(piece.position, done)


def _gathered(result: Result) -> Generated:
    gathering = Gathering()
    for part in result.parts:
        if isinstance(part, Delta):
            gathering.add(part)
    return gathering.whole(result.done)
