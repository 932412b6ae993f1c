"""Endpoints that write texts, in any dialect: whole answers, or streams of them.

A stream begins when its first part is there: what is refused before that is refused with a status of its own.
"""

import logging
import time
from collections.abc import AsyncIterator, Callable

import msgspec

from appliance import telemetry
from appliance.catalog import Route
from appliance.compat.formats import Format
from appliance.compat.generation import Gathering, Generated, GenerationCall, StreamWriter
from appliance.errors import ApplianceError, ClientGone, MalformedBody
from appliance.gateway.calls import Calls, notes
from appliance.gateway.endpoints import AnyAnswer, Endpoint, internal_error
from appliance.gateway.http import Request, StreamedAnswer, written
from appliance.gateway.operation import ServeNamed
from appliance.gateway.pending_calls import Piece, Result
from appliance.jobs import Delta, Done, Usage

PING = b": ping\n\n"
EVENT_STREAM = b"text/event-stream"

Decode = Callable[[bytes], GenerationCall]

_log = logging.getLogger(__name__)


class Generation:
    """All of them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def endpoint(self, decode: Decode) -> Endpoint:
        """The endpoint of a dialect."""

        async def post(request: Request) -> AnyAnswer:
            call = decode(await self._json(request))
            return await self._answer(request, call, self._calls.route(call.model, "generate"))

        return post

    def deployment(self, decode: Decode) -> ServeNamed:
        """The same at Azure's path, which names the model."""

        async def post(request: Request, name: str) -> AnyAnswer:
            call = decode(await self._json(request))
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
        results = await self._calls.run_each(request, route.model, call.tasks)
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
        stream = self._calls.stream(request, route.model, call.tasks)
        pieces = await stream.__aenter__()

        async def close() -> None:
            await stream.__aexit__(None, None, None)

        try:
            first = await anext(pieces)
            while first is None:  # it may wait for long
                first = await anext(pieces)
        except BaseException:
            await close()
            raise
        telemetry.FIRST_TOKEN_SECONDS.labels(route.model).observe(time.perf_counter() - started_s)
        parts = self._parts(route.model, writer, first, pieces)
        return StreamedAnswer(parts, content_type=writer.content_type, headers=notes, close=close)

    async def _parts(
        self, model: str, writer: StreamWriter, first: Piece, pieces: AsyncIterator[Piece | None]
    ) -> AsyncIterator[bytes]:
        """The stream in the client's dialect; what goes wrong now can only be told within it."""
        usages: list[Usage] = []
        try:
            yield writer.start()
            yield _written(writer, first, usages)
            async for piece in pieces:
                if piece is not None:
                    yield _written(writer, piece, usages)
                elif writer.takes_pings:
                    yield PING
            self._calls.answered(model, usages)
            yield writer.end()
        except ClientGone:
            return
        except ApplianceError as error:
            _log.warning("a text of %s broke off: %s (%s)", model, error.message, error.code)
            yield writer.error(error)
        except Exception:
            # A bug. The client hears that the text is not complete, the log has the traceback.
            _log.exception("a text of %s broke off", model)
            yield writer.error(internal_error())


def as_json(body: bytes, form: Format) -> bytes:
    """The body of a request as JSON, in which messages and schemas travel on. Raises MalformedBody."""
    if form == "json":
        return body
    try:
        return msgspec.json.encode(msgspec.msgpack.decode(body))
    except (msgspec.DecodeError, msgspec.EncodeError, UnicodeDecodeError, RecursionError, TypeError) as exc:
        raise MalformedBody(f"the request body is not valid msgpack: {exc}") from exc


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
