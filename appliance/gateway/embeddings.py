"""`POST /v1/embeddings`: one request becomes a few jobs, their rows become one answer."""

import asyncio
from collections.abc import Sequence

from appliance.catalog import Route
from appliance.compat import formats, openai_embeddings, token_ids
from appliance.compat.openai_embeddings import EmbeddingsCall
from appliance.compat.widths import Widths
from appliance.gateway.calls import Calls, notes
from appliance.gateway.http import Answer, Request
from appliance.gateway.spaces import space_headers
from appliance.jobs import Embed, Intent

INTENT_HEADER = b"x-appliance-input-type"


class Embeddings:
    """The endpoint, with what it needs."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def post(self, request: Request) -> Answer:
        """Raises an ApplianceError for every refusal."""
        return await self._answer(request, None)

    async def post_deployment(self, request: Request, name: str) -> Answer:
        """Azure's: the path names the model. Raises like `post`."""
        return await self._answer(request, name)

    async def _answer(self, request: Request, model: str | None) -> Answer:
        call = openai_embeddings.decode(await self._calls.body(request), request.form, model=model)
        route = self._calls.route(call.model, "embed")
        policy = route.policy
        outputs = call.outputs or route.outputs[:1]
        is_dense = "dense" in outputs
        widths = Widths.of(
            call.width, width=policy.width if is_dense else None, pad_to=policy.pad_to if is_dense else None
        )
        intent = call.intent or _intent(request) or policy.intent
        truncation = call.truncation(policy.truncation, outputs)
        inputs = await _inputs(call, route)
        is_native = bool(inputs) and isinstance(inputs[0], bytes)

        def task(first: int, last: int) -> Embed:
            chunk = inputs[first:last]
            return Embed(
                inputs=() if is_native else tuple(chunk),  # type: ignore[arg-type]  # all are of one type
                ids=tuple(chunk) if is_native else (),  # type: ignore[arg-type]
                intent=intent,
                width=widths.computed,
                truncation=truncation,
                outputs=outputs,
            )

        outcome = await self._calls.run(request, route.model, inputs, task)
        headers = notes(ignored=call.ignored, truncated=outcome.truncated)
        headers += space_headers(request, widths.space(outcome.space))
        form = request.answer_form
        if call.outputs is None and not is_dense:
            call = openai_embeddings.asking_for(call, outputs)
        body = openai_embeddings.encode(
            call, outcome.parts, widths=widths, input_tokens=outcome.input_tokens, form=form
        )
        return Answer(body, content_type=formats.CONTENT_TYPES[form], headers=headers)


async def _inputs(call: EmbeddingsCall, route: Route) -> Sequence[str | bytes]:
    if not call.ids:
        return call.texts
    if route.policy.has_native_ids:
        return token_ids.packed(call.ids)
    return await asyncio.to_thread(token_ids.texts, call.ids, model=call.model)  # slow the first time


def _intent(request: Request) -> Intent | None:
    """Of a client that can set a header and no field."""
    offered = request.header(INTENT_HEADER)
    if offered is None:
        return None
    return openai_embeddings.intent_of(offered.decode("latin-1").strip().lower(), field=INTENT_HEADER.decode())
