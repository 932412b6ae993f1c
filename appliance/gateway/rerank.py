"""`POST /v1/rerank`, `/v2/rerank`, `/rerank`: documents become a few jobs, their scores one ranking."""

import uuid

import numpy as np

from appliance.compat import rerank
from appliance.compat.cohere_meta import Version
from appliance.errors import BadVector
from appliance.gateway.calls import Calls, notes
from appliance.gateway.http import Answer, Request, written
from appliance.jobs import Rerank, Scores


class Reranking:
    """The endpoints, with what they need."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def v1(self, request: Request) -> Answer:
        """Cohere's first version, Jina's and Voyage's. Raises an ApplianceError for every refusal."""
        return await self._answer(request, "1")

    async def v2(self, request: Request) -> Answer:
        """Cohere's second version, which cuts each document to 4,096 tokens unless told otherwise."""
        return await self._answer(request, "2")

    async def _answer(self, request: Request, version: Version) -> Answer:
        call = rerank.decode(await self._calls.body(request), version, request.form)
        route = self._calls.route(call.body.model, "rerank")
        refuses_long = route.policy.too_long == "error"

        def task(first: int, last: int) -> Rerank:
            return call.task(first, last, refuses_long=refuses_long)

        outcome = await self._calls.run(
            request, route.model, call.texts, task, shared_bytes=call.shared_bytes, field="documents"
        )
        scores = np.frombuffer(b"".join(part.data for part in outcome.parts if isinstance(part, Scores)), dtype="<f4")
        if not np.isfinite(scores).all():
            raise BadVector("a score came back that is no number; try again")
        answer = rerank.answer(
            call, scores, answer_id=str(uuid.uuid4()), model=route.model, input_tokens=outcome.input_tokens
        )
        return written(answer, request.answer_form, headers=notes(ignored=call.ignored, truncated=outcome.truncated))
