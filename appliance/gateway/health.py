"""`/healthz`: the process lives. `/readyz`: every served model really answered through queue and engine, lately.

The proof is a canary: a small job that takes the path of every other job. Real traffic is proof too, of other gateways
as well, and while there is some no canary is sent: it would queue behind the work, and take a text's place.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping, Sequence

import msgspec

from appliance import telemetry
from appliance.errors import ApplianceError, DeadlinePassed
from appliance.gateway.address import SUPERVISOR
from appliance.gateway.dispatch import Dispatcher
from appliance.gateway.http import IS_OWN, Answer, Request
from appliance.jobs import CANARY_PREFIX, Classify, Embed, Extract, Generate, Job, Output, Rerank, Sampling, Task

CANARY_DEADLINE_S = 10.0
CANARIES: dict[str, Task] = {
    "embed": Embed(inputs=("canary",), intent="document"),  # said, so that no missing prompt is counted
    "rerank": Rerank(query="canary", documents=("canary",)),
    "classify": Classify(inputs=("canary",)),
    "extract": Extract(inputs=("canary",)),
    "generate": Generate(prompt="canary", tokens_max=1, sampling=Sampling(temperature=0.0)),
}
RETRY_S = 0.2  # until a model has answered for the first time, or while it fails
TELL_S = 1.0  # between two looks at what the figures say
WINDOW_INTERVALS = 3  # a proof older than this many canary intervals and one deadline is stale

_log = logging.getLogger(__name__)


class Canary:
    """Keeps each model's last proof of life, and what it said of a model that writes."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        models: Mapping[str, Sequence[str]],
        *,
        interval_s: float,
        outputs: Mapping[str, Output] | None = None,
    ) -> None:
        """`models` are the served ones with the tasks of each: the canary is of the first.

        `outputs` says what a model that embeds is asked for, where that is no dense vector.
        """
        self._dispatcher = dispatcher
        self._outputs = outputs or {}
        self._models = models
        self._interval_s = interval_s
        self._proved_s: dict[str, float] = {}
        self._tokens_max: dict[str, int] = {}
        self._faults: dict[str, str] = dict.fromkeys(models, "starting")

    async def run(self) -> None:
        """Send canaries until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._tell())
            for model in self._models:
                group.create_task(self._watch(model))

    def prove(self, model: str) -> None:
        """A request for the model was just answered."""
        self._proved_s[model] = time.monotonic()
        if self._faults.pop(model, None) is not None:
            _log.info("%s answers", model)

    def hear(self, model: str) -> None:
        """The model answers other gateways: as good, once it has answered this one."""
        if model in self._proved_s:
            self.prove(model)

    def tokens_max(self, model: str) -> int | None:
        """What a prompt and its text may have together, as the node that wrote last says; None before that."""
        return self._tokens_max.get(model)

    def faults(self) -> dict[str, str]:
        """The models that have not answered lately, each with the newest reason."""
        window_s = WINDOW_INTERVALS * self._interval_s + CANARY_DEADLINE_S
        oldest_s = time.monotonic() - window_s
        stale = [model for model in self._models if self._proved_s.get(model, oldest_s - 1) < oldest_s]
        return {model: self._faults.get(model, "stale") for model in stale}

    def _task(self, model: str) -> Task:
        task = CANARIES[self._models[model][0]]
        if isinstance(task, Embed) and model in self._outputs:
            return msgspec.structs.replace(task, outputs=(self._outputs[model],))
        return task

    async def _tell(self) -> None:
        """Keep the figures of readiness true: it also ends by itself, as time passes."""
        while True:
            faults = self.faults()
            for model in self._models:
                telemetry.READY.labels(model).set(model not in faults)
            await asyncio.sleep(TELL_S)

    async def _watch(self, model: str) -> None:
        while True:
            if await self._send(model):
                await self._unproved(model)
            else:
                await asyncio.sleep(RETRY_S)

    async def _unproved(self, model: str) -> None:
        """Wait until the last proof is an interval old."""
        while True:
            left_s = self._proved_s[model] + self._interval_s - time.monotonic()
            if left_s <= 0:
                return
            await asyncio.sleep(left_s)

    async def _send(self, model: str) -> bool:
        job = Job(
            id=f"{CANARY_PREFIX}{secrets.token_hex(8)}",
            model=model,
            task=self._task(model),
            reply_to=self._dispatcher.reply_to,
            deadline_s=time.time() + CANARY_DEADLINE_S,
        )
        started_s = time.monotonic()
        try:
            (result,) = await self._dispatcher.run([job])
        except ApplianceError as error:
            if self._proved_s.get(model, started_s) > started_s:
                return True  # by the work that the canary waited behind
            is_late = isinstance(error, DeadlinePassed)
            if self._faults.get(model) != error.code and model in self._proved_s:
                words = f"no answer within {CANARY_DEADLINE_S:g} s" if is_late else error.message
                _log.warning("canary for %s: %s", model, words)
            # Until it has answered once, a canary that comes too late says only that the model is not up yet.
            is_starting = is_late and model not in self._proved_s
            self._faults[model] = "starting" if is_starting else error.code
            return False
        telemetry.CANARY_SECONDS.labels(model).set(time.monotonic() - started_s)
        self.prove(model)
        if result.done.tokens_max:
            self._tokens_max[model] = result.done.tokens_max
        return True


class Health:
    """The two endpoints."""

    def __init__(self, canary: Canary, models: Sequence[str]) -> None:
        self._canary = canary
        self._models = models

    async def healthz(self, request: Request) -> Answer:
        """The process answers."""
        return Answer(b'{"status":"ok"}')

    async def readyz(self, request: Request) -> Answer:
        """200 when every served model is proved, else 503 with what is missing."""
        if request.header(b"user-agent") == SUPERVISOR:
            request.scope["state"][IS_OWN] = True
        faults = self._canary.faults()
        models = {model: faults.get(model, "ready") for model in self._models}
        body = msgspec.json.encode({"status": "unready" if faults else "ready", "models": models})
        return Answer(body, status=503 if faults else 200)
