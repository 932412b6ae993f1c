"""`POST /v1/classify`: by a model with labels of its own, or by the vectors of labelled examples."""

import asyncio

import numpy as np

from appliance.catalog import Route
from appliance.compat import cohere_classify, few_shot
from appliance.compat.cohere_classify import ClassifyAnswer, ClassifyCall
from appliance.compat.vectors import matrix
from appliance.errors import BadVector, InvalidRequest
from appliance.gateway.calls import Calls, check_dense, notes
from appliance.gateway.http import Answer, Request, written
from appliance.gateway.naming import naming
from appliance.jobs import Classify, Embed, Labels, Truncation


class Classification:
    """The endpoint, with what it needs."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._fitting = asyncio.Lock()  # one at a time: 2,500 examples take a second and 300 MB

    async def post(self, request: Request) -> Answer:
        """Raises an ApplianceError for every refusal."""
        call = cohere_classify.decode(await self._calls.body(request), request.form)
        route = self._route(call)
        by = self._by_labels if "classify" in route.facts.tasks else self._by_examples
        answer, truncated = await by(request, route, call)
        return written(answer, request.answer_form, headers=notes(ignored=call.ignored, truncated=truncated))

    def _route(self, call: ClassifyCall) -> Route:
        """Without a model's name, the one that can do with what the client has sent."""
        if call.labels:
            return self._calls.route(call.model, "embed", "classify")
        return self._calls.route(call.model, "classify", "embed")

    async def _by_labels(
        self, request: Request, route: Route, call: ClassifyCall
    ) -> tuple[ClassifyAnswer, tuple[int | str, ...]]:
        if call.labels:
            raise InvalidRequest(
                f"the model '{route.name}' has labels of its own; leave 'examples' out, or name a model that embeds",
                param="examples",
            )
        refuses_long = route.policy.too_long == "error"
        truncation: Truncation = call.truncation or ("none" if refuses_long else "end")

        def task(first: int, last: int) -> Classify:
            return Classify(call.inputs[first:last], truncation)

        with naming(call.name_of):
            outcome = await self._calls.run(request, route.model, call.inputs, task)
        parts = [part for part in outcome.parts if isinstance(part, Labels)]
        if len({(part.names, part.are_independent) for part in parts}) != 1:
            raise BadVector("the parts of the request came back with different labels; try again")
        names = parts[0].names
        found = np.frombuffer(b"".join(part.data for part in parts), "<f4").reshape(-1, len(names)).astype(np.float64)
        if not np.isfinite(found).all():
            raise BadVector("a confidence came back that is no number; try again")
        are_independent = parts[0].are_independent
        return cohere_classify.answer(call.inputs, names, found, are_independent=are_independent), outcome.truncated

    async def _by_examples(
        self, request: Request, route: Route, call: ClassifyCall
    ) -> tuple[ClassifyAnswer, tuple[int | str, ...]]:
        if not call.labels:
            raise InvalidRequest(
                f"the model '{route.name}' has no labels of its own; send 'examples', two or more of each label",
                param="examples",
            )
        check_dense(route)
        truncation = call.truncation or route.policy.truncation

        def task(first: int, last: int) -> Embed:
            return Embed(call.texts[first:last], intent=route.policy.intent, truncation=truncation)

        with naming(call.name_of):
            outcome = await self._calls.run(request, route.model, call.texts, task)
        vectors = matrix(outcome.parts).astype(np.float64)
        count = len(call.example_texts)
        async with self._fitting:
            found = await asyncio.to_thread(
                few_shot.confidences,
                vectors[:count],
                np.array(call.example_labels),
                vectors[count:],
                label_count=len(call.labels),
            )
        truncated = tuple(index - count if index >= count else f"examples[{index}]" for index in outcome.truncated)
        return cohere_classify.answer(call.inputs, call.labels, found, are_independent=False), truncated
