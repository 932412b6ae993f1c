"""`POST /v1/tokenize`, `/v1/detokenize` and `/v1/check-api-key`: Cohere's small endpoints.

cohere-python tokenizes by itself unless called with `offline=False`, and comes here when it finds no `tokenizer_url`.
"""

from appliance.compat import cohere_tokens
from appliance.compat.cohere_key import CheckKeyAnswer
from appliance.gateway.calls import Calls, notes
from appliance.gateway.http import Answer, Request, written
from appliance.jobs import Text, Tokenized


class Tokens:
    """The endpoints, with what they need. Every model that reads text has tokens, whatever it does with them."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def tokenize(self, request: Request) -> Answer:
        """Raises an ApplianceError for every refusal."""
        call = cohere_tokens.decode_tokenize(await self._calls.body(request), request.form)
        model = self._calls.catalog.resolve(call.model).model
        (found,) = (await self._calls.run_one(request, model, call.task)).parts
        assert isinstance(found, Tokenized), "the dispatcher lets through only what answers the task"
        return written(cohere_tokens.tokenize_answer(found), request.answer_form, headers=notes(ignored=call.ignored))

    async def detokenize(self, request: Request) -> Answer:
        """Raises like `tokenize`."""
        call = cohere_tokens.decode_detokenize(await self._calls.body(request), request.form)
        model = self._calls.catalog.resolve(call.model).model
        (found,) = (await self._calls.run_one(request, model, call.task)).parts
        assert isinstance(found, Text), "the dispatcher lets through only what answers the task"
        return written(
            cohere_tokens.detokenize_answer(found.text), request.answer_form, headers=notes(ignored=call.ignored)
        )

    async def check_key(self, request: Request) -> Answer:
        """The front has checked it already."""
        return written(CheckKeyAnswer(), request.answer_form)
