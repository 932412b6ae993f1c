"""`POST /v1/extract`: texts become a few jobs, their spans one answer."""

import math

from appliance.compat import extract
from appliance.errors import BadVector
from appliance.gateway.calls import Calls, notes
from appliance.gateway.http import Answer, Request, written
from appliance.jobs import Extract, Span, Spans


class Extraction:
    """The endpoint, with what it needs."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def post(self, request: Request) -> Answer:
        """Raises an ApplianceError for every refusal."""
        call = extract.decode(await self._calls.body(request), request.form)
        route = self._calls.route(call.body.model, "extract")
        refuses_long = route.policy.too_long == "error"

        def task(first: int, last: int) -> Extract:
            return call.task(first, last, refuses_long=refuses_long)

        outcome = await self._calls.run(request, route.model, call.texts, task, shared_bytes=call.shared_bytes)
        found = [spans for part in outcome.parts if isinstance(part, Spans) for spans in part.inputs]
        if not all(_is_sound(span, text) for text, spans in zip(call.texts, found, strict=True) for span in spans):
            raise BadVector("a span came back that lies outside of its text, or without a score; try again")
        answer = extract.answer(call, found, input_tokens=outcome.input_tokens)
        return written(answer, request.answer_form, headers=notes(ignored=call.ignored, truncated=outcome.truncated))


def _is_sound(span: Span, text: str) -> bool:
    return 0 <= span.start <= span.end <= len(text) and math.isfinite(span.score)
