"""`POST /v1/embeddings`: one request becomes a few jobs, their rows become one answer."""

import itertools
import re
import secrets
import time

from appliance import telemetry
from appliance.catalog import Catalog
from appliance.compat import openai_embeddings
from appliance.compat.chunks import chunks
from appliance.errors import BadVector
from appliance.gateway.dispatch import Dispatcher, Result
from appliance.gateway.health import Canary
from appliance.gateway.http import Answer, Headers, Request
from appliance.jobs import Job, Rows
from appliance.settings import GatewaySettings, QueueSettings

NAMES_IN_HEADER_MAX = 64
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Embeddings:
    """The endpoint, with what it needs."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        dispatcher: Dispatcher,
        canary: Canary,
        gateway: GatewaySettings,
        queue: QueueSettings,
    ) -> None:
        self._catalog = catalog
        self._dispatcher = dispatcher
        self._canary = canary
        self._gateway = gateway
        self._queue = queue
        self._prefix = secrets.token_hex(8)  # of this process: with it a count makes ids that no other gateway makes
        self._calls = itertools.count()

    async def post(self, request: Request) -> Answer:
        """Raises an ApplianceError for every refusal."""
        body = await request.body(bytes_max=self._gateway.body_bytes_max)
        call = openai_embeddings.decode(body)
        model = self._catalog.resolve(call.model).model
        jobs = self._jobs(call, model=model, request=request)
        results = await self._dispatcher.run(jobs, gone=request.gone)
        self._canary.prove(model)
        return self._answer(call, results, model=model)

    def _jobs(self, call: openai_embeddings.EmbeddingsCall, *, model: str, request: Request) -> list[Job]:
        call_id = f"{self._prefix}-{next(self._calls)}"
        deadline_s = time.time() + deadline_after_s(request, timeout_s_max=self._gateway.request_timeout_s)
        spans = chunks(
            call.inputs,
            bytes_max=self._queue.chunk_bytes_max,
            inputs_max=self._queue.chunk_inputs_max,
            payload_bytes_max=self._dispatcher.payload_bytes_max,
        )
        return [
            Job(
                id=f"{call_id}-{span.start}",
                model=model,
                task=call.task(span.start, span.stop),
                reply_to=self._dispatcher.reply_to,
                deadline_s=deadline_s,
                first_index=span.start,
                traceparent=traceparent_of(request),
            )
            for span in spans
        ]

    def _answer(self, call: openai_embeddings.EmbeddingsCall, results: list[Result], *, model: str) -> Answer:
        rows = [part for result in results for part in result.parts if isinstance(part, Rows)]
        width = rows[0].width
        if any(part.width != width for part in rows):
            raise BadVector("the parts of the request came back in different widths; try again")
        tokens = sum(result.usage.input_tokens for result in results)
        truncated = [index for result in results for index in result.truncated]
        telemetry.INPUT_TOKENS.labels(model).inc(tokens)
        if truncated:
            telemetry.TRUNCATED_INPUTS.labels(model).inc(len(truncated))
        buffers = [memoryview(part.data) for part in rows]
        body = openai_embeddings.encode(call, buffers, width=width, input_tokens=tokens)
        return Answer(body, headers=_notes(call.ignored, truncated))


def deadline_after_s(request: Request, *, timeout_s_max: float) -> float:
    """How long the client waits: what its SDK says (`x-stainless-read-timeout`, seconds), bounded by our own limit."""
    offered = request.header(b"x-stainless-read-timeout") or request.header(b"x-stainless-timeout")
    try:
        offered_s = float(offered) if offered is not None else timeout_s_max
    except ValueError:
        return timeout_s_max
    return offered_s if 0 < offered_s < timeout_s_max else timeout_s_max


def traceparent_of(request: Request) -> str:
    """The client's W3C trace context; "" when it sent none, or something else that jobs should not carry."""
    offered = request.header(b"traceparent") or b""
    return offered.decode("ascii") if _TRACEPARENT.fullmatch(offered) else ""


def _notes(ignored: tuple[str, ...], truncated: list[int]) -> Headers:
    """What was done to the request besides answering it, as headers."""
    notes: Headers = []
    if ignored:
        names = ",".join(name for name in ignored if name.isascii() and name.isprintable())
        notes.append((b"x-appliance-ignored", names.encode()[:1024]))
    if truncated:
        listed = ",".join(map(str, truncated[:NAMES_IN_HEADER_MAX]))
        more = ",..." if len(truncated) > NAMES_IN_HEADER_MAX else ""
        notes.append((b"x-appliance-truncated", f"{listed}{more}".encode()))
    return notes
