"""`POST /v1/embed` and `POST /v2/embed`: a few jobs, their rows as one answer of the types that were asked for."""

from appliance.compat import cohere_embed
from appliance.compat.cohere_meta import Version
from appliance.compat.vectors import matrix
from appliance.compat.widths import Widths
from appliance.gateway.calls import Calls, check_dense, notes
from appliance.gateway.http import Answer, Request, written
from appliance.gateway.naming import naming
from appliance.gateway.spaces import space_headers
from appliance.jobs import Embed

# What a node calls a field, and what Cohere does.
_FIELDS = {"dimensions": "output_dimension"}


class CohereEmbeddings:
    """The endpoints, with what they need."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def v1(self, request: Request) -> Answer:
        """Bare floats, unless types are named. Raises an ApplianceError for every refusal."""
        return await self._answer(request, "1")

    async def v2(self, request: Request) -> Answer:
        """By type, always. Raises like `v1`."""
        return await self._answer(request, "2")

    async def _answer(self, request: Request, version: Version) -> Answer:
        call = cohere_embed.decode(await self._calls.body(request), version, request.form)
        route = self._calls.route(call.model, "embed")
        check_dense(route)
        policy = route.policy
        widths = Widths.of(call.width, width=policy.width, pad_to=policy.pad_to)
        intent = call.intent or policy.intent
        truncation = call.truncation or policy.truncation

        def task(first: int, last: int) -> Embed:
            return Embed(
                call.texts[first:last],
                intent=intent,
                width=widths.computed,
                truncation=truncation,
                tokens_max=call.tokens_max,
            )

        with naming(call.name_of, _FIELDS):
            outcome = await self._calls.run(request, route.model, call.texts, task)
        vectors = matrix(outcome.parts)
        answer = cohere_embed.answer(
            call,
            widths.pad(vectors),
            width=vectors.shape[1],
            input_tokens=outcome.input_tokens,
            form=request.answer_form,
        )
        headers = notes(ignored=call.ignored, truncated=outcome.truncated)
        headers += space_headers(request, widths.space(outcome.space))
        return written(answer, request.answer_form, headers=headers)
