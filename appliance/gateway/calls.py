"""What every inference endpoint does between its body and its answer: route, cut into jobs, run, and take notes.

An endpoint reads the body in its dialect, and writes the answer in it; the rest is here, once.
"""

import itertools
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager

import msgspec

from appliance import telemetry
from appliance.catalog import Catalog, Route
from appliance.compat.chunks import chunks
from appliance.errors import BadVector, InvalidRequest
from appliance.gateway.dispatch import Dispatcher
from appliance.gateway.health import Canary
from appliance.gateway.http import ASKED, Headers, Request
from appliance.gateway.pending_calls import Piece, Result
from appliance.jobs import Job, Part, Task, Usage
from appliance.presets import TaskName
from appliance.settings import GatewaySettings, QueueSettings

NAMES_IN_HEADER_MAX = 64
ENDPOINTS: dict[TaskName, str] = {
    "embed": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "classify": "/v1/classify",
    "extract": "/v1/extract",
    "generate": "/v1/chat/completions",
}
_TRACEPARENT = re.compile(rb"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


class Outcome(msgspec.Struct, frozen=True):
    """What a call's jobs came to, in the order of its inputs."""

    parts: tuple[Part, ...]
    input_tokens: int
    truncated: tuple[int, ...]  # indices of inputs that were cut
    space: str  # of an embedding: see `jobs.Done`


class Calls:
    """Runs calls; shared by all endpoints of a gateway."""

    def __init__(
        self,
        *,
        catalog: Catalog,
        dispatcher: Dispatcher,
        canary: Canary,
        gateway: GatewaySettings,
        queue: QueueSettings,
    ) -> None:
        self.catalog = catalog
        self._dispatcher = dispatcher
        self._canary = canary
        self.gateway = gateway
        self._queue = queue
        self._prefix = secrets.token_hex(8)  # of this process: with it a count makes ids that no other gateway makes
        self._count = itertools.count()

    async def body(self, request: Request) -> bytes:
        """The whole body, within the gateway's limits."""
        return await request.body(bytes_max=self.gateway.body_bytes_max)

    def route(self, name: str | None, *tasks: TaskName) -> Route:
        """The model behind a public name, or the default one; it does at least one of `tasks`.

        Raises ModelNotFound, or InvalidRequest for a model of other tasks.
        """
        if name is None:
            return self.catalog.default(*tasks)
        route = self.catalog.resolve(name)
        if not any(task in route.facts.tasks for task in tasks):
            right = " or ".join(ENDPOINTS[other] for other in route.facts.tasks)
            raise InvalidRequest(
                f"the model '{name[:200]}' does not {' or '.join(tasks)}; it serves {right}, see GET /v1/models",
                param="model",
            )
        return route

    async def run(
        self,
        request: Request,
        model: str,
        inputs: Sequence[str | bytes],
        task: Callable[[int, int], Task],
        *,
        shared_bytes: int = 0,
        field: str = "input",
    ) -> Outcome:
        """One answer to all inputs. `task(first, last)` is the task for `inputs[first:last]`.

        `shared_bytes` is what each task holds besides its inputs, and `field` is the client's name of them. Raises an
        ApplianceError for whatever fails the call.
        """
        spans = chunks(
            inputs,
            bytes_max=self._queue.chunk_bytes_max,
            inputs_max=self._queue.chunk_inputs_max,
            payload_bytes_max=self._dispatcher.payload_bytes_max,
            shared_bytes=shared_bytes,
            field=field,
        )
        return await self._settled(request, model, ((span.start, task(span.start, span.stop)) for span in spans))

    async def run_one(self, request: Request, model: str, task: Task) -> Outcome:
        """The answer to a task that is not cut into several."""
        return await self._settled(request, model, [(0, task)])

    async def run_each(
        self, request: Request, model: str, tasks: Sequence[Task], *, within_s: float | None = None
    ) -> list[Result]:
        """The answer to each of several tasks, in their order; None: within what the client and we allow any answer."""
        jobs = self._jobs(request, model, enumerate(tasks), within_s=within_s)
        results = await self._dispatcher.run(jobs, gone=request.gone)
        self.answered(model, [result.usage for result in results])
        return results

    def stream(
        self, request: Request, model: str, tasks: Sequence[Task], *, within_s: float
    ) -> AbstractAsyncContextManager[AsyncIterator[Piece | None]]:
        """What comes of each of several tasks, as it comes; see `Dispatcher.stream`."""
        jobs = self._jobs(request, model, enumerate(tasks), within_s=within_s)
        return self._dispatcher.stream(jobs, gone=request.gone)

    def prove(self, model: str) -> None:
        """The model has answered something: it lives."""
        self._canary.prove(model)

    def answered(self, model: str, usages: Sequence[Usage]) -> None:
        """The model has answered: note that it lives, and what it did."""
        self._canary.prove(model)
        telemetry.INPUT_TOKENS.labels(model).inc(sum(usage.input_tokens for usage in usages))
        if output_tokens := sum(usage.output_tokens for usage in usages):
            telemetry.OUTPUT_TOKENS.labels(model).inc(output_tokens)

    async def _settled(self, request: Request, model: str, tasks: Iterable[tuple[int, Task]]) -> Outcome:
        jobs = self._jobs(request, model, tasks)
        outcome = _outcome(await self._dispatcher.run(jobs, gone=request.gone))
        self.answered(model, [Usage(outcome.input_tokens)])
        if outcome.truncated:
            telemetry.TRUNCATED_INPUTS.labels(model).inc(len(outcome.truncated))
        return outcome

    def _jobs(
        self, request: Request, model: str, tasks: Iterable[tuple[int, Task]], *, within_s: float | None = None
    ) -> list[Job]:
        call_id = f"{self._prefix}-{next(self._count)}"
        if within_s is None:
            within_s = deadline_after_s(request, timeout_s_max=self.gateway.request_timeout_s)
        deadline_s = time.time() + within_s
        request.scope["state"][ASKED] = f", of {model} in jobs {call_id}-*"  # by which a worker's log names them
        traceparent = traceparent_of(request)
        return [
            Job(
                id=f"{call_id}-{first}",
                model=model,
                task=task,
                reply_to=self._dispatcher.reply_to,
                deadline_s=deadline_s,
                first_index=first,
                traceparent=traceparent,
            )
            for first, task in tasks
        ]


def _outcome(results: Sequence[Result]) -> Outcome:
    if any(result.done.space != results[0].done.space for result in results):
        raise BadVector("the parts of the request were computed by different versions of the model; try again")
    return Outcome(
        parts=tuple(part for result in results for part in result.parts),
        input_tokens=sum(result.usage.input_tokens for result in results),
        truncated=tuple(index for result in results for index in result.done.truncated),
        space=results[0].done.space,
    )


def check_dense(route: Route) -> None:
    """Raises InvalidRequest for a model without dense vectors, where nothing else can be answered."""
    if "dense" not in route.outputs:
        raise InvalidRequest(
            f"the model '{route.name[:200]}' has no dense vectors; ask /v1/embeddings for {route.outputs[0]} ones",
            param="model",
        )


def notes(*, ignored: Sequence[str] = (), truncated: Sequence[int | str] = ()) -> Headers:
    """What was done to the request besides answering it, as headers."""
    headers: Headers = []
    if ignored:
        names = ",".join(name for name in ignored if name.isascii() and name.isprintable())
        headers.append((b"x-appliance-ignored", names.encode()[:1024]))
    if truncated:
        listed = ",".join(map(str, truncated[:NAMES_IN_HEADER_MAX]))
        more = ",..." if len(truncated) > NAMES_IN_HEADER_MAX else ""
        headers.append((b"x-appliance-truncated", f"{listed}{more}".encode()))
    return headers


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
