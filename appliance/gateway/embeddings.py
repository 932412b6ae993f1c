"""`POST /v1/embeddings`: one request becomes a few jobs, their rows become one answer."""

from appliance.compat import formats, openai_embeddings
from appliance.errors import BadVector
from appliance.gateway.calls import Calls, notes
from appliance.gateway.http import Answer, Request
from appliance.jobs import Rows


class Embeddings:
    """The endpoint, with what it needs."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def post(self, request: Request) -> Answer:
        """Raises an ApplianceError for every refusal."""
        call = openai_embeddings.decode(await self._calls.body(request), request.form)
        model = self._calls.route(call.model, "embed").model
        outcome = await self._calls.run(request, model, call.inputs, call.task)
        rows = [part for part in outcome.parts if isinstance(part, Rows)]
        width = rows[0].width
        if any(part.width != width for part in rows):
            raise BadVector("the parts of the request came back in different widths; try again")
        buffers = [memoryview(part.data) for part in rows]
        form = request.answer_form
        body = openai_embeddings.encode(call, buffers, width=width, input_tokens=outcome.input_tokens, form=form)
        return Answer(
            body,
            content_type=formats.CONTENT_TYPES[form],
            headers=notes(ignored=call.ignored, truncated=outcome.truncated),
        )
