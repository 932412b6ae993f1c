"""`POST /v1/decisions`: questions become a few jobs, their probabilities one answer."""

from appliance.compat import decisions
from appliance.compat.generation import in_names
from appliance.errors import ApplianceError
from appliance.gateway.calls import Calls, notes
from appliance.gateway.generation import as_json
from appliance.gateway.http import Answer, Request, written
from appliance.jobs import Decide, Usage, Weights

# A node begins with all of a job's questions before it turns to the next job.
QUESTIONS_A_JOB_MAX = 16


class Decisions:
    """The endpoint, with what it needs."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def post(self, request: Request) -> Answer:
        """Raises an ApplianceError for every refusal."""
        call = decisions.decode(as_json(await self._calls.body(request), request.form))
        route = self._calls.route(call.model, "generate")
        tasks = [
            Decide(call.messages, call.questions[start : start + QUESTIONS_A_JOB_MAX])
            for start in range(0, len(call.questions), QUESTIONS_A_JOB_MAX)
        ]
        try:
            results = await self._calls.run_each(request, route.model, tasks)
        except ApplianceError as error:
            raise in_names(error, decisions.NAMES) from error
        weights = [
            row for result in results for part in result.parts if isinstance(part, Weights) for row in part.questions
        ]
        usage = Usage(
            input_tokens=sum(result.usage.input_tokens for result in results),
            output_tokens=sum(result.usage.output_tokens for result in results),
            cached_tokens=sum(result.usage.cached_tokens for result in results),
        )
        answer = call.answer(weights, model=call.model, usage=usage)
        return written(answer, request.answer_form, headers=notes(ignored=call.ignored))
