"""The gateway in process, over a queue that answers every kind of task at once and predictably."""

import asyncio
import re
from collections.abc import Sequence
from typing import assert_never

import httpx
import numpy as np
from litestar.types import ASGIApp

from appliance.catalog import Catalog
from appliance.gateway.app import build_app
from appliance.gateway.calls import Calls
from appliance.gateway.dispatch import Dispatcher
from appliance.gateway.health import Canary
from appliance.gateway.operation import Operation
from appliance.gateway.surface import operations
from appliance.jobs import (
    Classify,
    Decide,
    Detokenize,
    Done,
    Embed,
    Extract,
    Failed,
    Generate,
    Job,
    Labels,
    Lane,
    Part,
    Reply,
    Rerank,
    Rows,
    Scores,
    Span,
    Spans,
    SparseRow,
    SparseRows,
    Task,
    Text,
    Tokenize,
    Tokenized,
    TokenRows,
    Usage,
    decode_job,
    encode_replies,
)
from appliance.presets import Facts
from appliance.settings import AliasSettings, GatewaySettings, QueueSettings, Settings

KEY = "sk-the-key"
WIDTH = 4
TOKENS_OF_AN_INPUT = 10
LABEL_NAMES = ("negative", "positive")
MODELS = (
    Facts("org/embedder", tasks=("embed",), width=WIDTH, outputs=("dense", "sparse", "multivector")),
    Facts("org/ranker", tasks=("rerank",), aliases=("rerank-v3.5",)),
    Facts("org/classifier", tasks=("classify",)),
    Facts("org/finder", tasks=("extract",)),
)
# A request that each endpoint answers.
BODIES: dict[str, dict[str, object]] = {
    "/v1/embeddings": {"model": "org/embedder", "input": "a"},
    "/openai/deployments/{name}/embeddings": {"input": "a"},
    "/v1/embed": {"model": "org/embedder", "texts": ["a"]},
    "/v2/embed": {"model": "org/embedder", "texts": ["a"]},
    "/v1/rerank": {"model": "org/ranker", "query": "q", "documents": ["a"]},
    "/v2/rerank": {"model": "org/ranker", "query": "q", "documents": ["a"]},
    "/v1/classify": {"model": "org/classifier", "inputs": ["a"]},
    "/v1/tokenize": {"model": "org/ranker", "text": "a"},
    "/v1/detokenize": {"model": "org/ranker", "tokens": [97]},
    "/v1/extract": {"model": "org/finder", "input": "a"},
}


def url_of(path: str) -> str:
    """A path of the table with a model's name in it, where it takes one."""
    return path.replace("{name}", "org/embedder")


class AnsweringQueue:
    """Answers each job at once, with `answer_to`'s parts; or with `failure`, or not at all."""

    reply_to = "replies.here"
    payload_bytes_max = 8_000_000
    is_connected = True

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.jobs: list[Job] = []
        self.failure: Failed | None = None
        self.truncated: tuple[int, ...] = ()
        self.space = ""
        self.parts: list[Part] | None = None  # instead of what belongs to the task
        self._dispatcher = dispatcher

    async def submit(self, *, job_id: str, message_id: str, model: str, lane: Lane, payload: bytes) -> None:
        job = decode_job(payload)
        self.jobs.append(job)
        parts = answer_to(job.task) if self.parts is None else self.parts
        numbers = range(job.first_index, job.first_index + inputs_of(job.task))
        done = Done(
            Usage(TOKENS_OF_AN_INPUT * len(numbers)),
            tuple(number for number in self.truncated if number in numbers),
            self.space,
        )
        events = [*parts, done] if self.failure is None else [self.failure]
        replies = [Reply(job_id, 1, seq, event) for seq, event in enumerate(events)]
        asyncio.get_running_loop().call_soon(self._dispatcher.on_replies, encode_replies(replies))

    async def cancel(self, job_ids: Sequence[str]) -> None:
        """Nothing is ever under way."""


def answer_to(task: Task) -> list[Part]:
    """Vectors of ones; a document that is a number is as relevant as that; capital words are persons."""
    match task:
        case Embed():
            return _embedded(task)
        case Rerank(documents=documents):
            return [Scores(_floats([_score(document) for document in documents]))]
        case Classify(inputs=inputs):
            return [Labels(LABEL_NAMES, _floats([0.25, 0.75] * len(inputs)))]
        case Extract():
            return [Spans(tuple(_spans(text, task) for text in task.inputs))]
        case Tokenize(text=text):
            return [Tokenized(tuple(map(ord, text)), tuple(text))]
        case Detokenize(ids=ids):
            return [Text("".join(chr(number % 128) for number in ids))]
        case Generate() | Decide():
            raise NotImplementedError
        case _:
            assert_never(task)


def inputs_of(task: Task) -> int:
    """How many inputs or documents it has."""
    match task:
        case Embed(inputs=inputs, ids=ids):
            return len(inputs) or len(ids)
        case Rerank(documents=documents):
            return len(documents)
        case Classify(inputs=inputs) | Extract(inputs=inputs):
            return len(inputs)
        case Tokenize() | Detokenize() | Generate() | Decide():
            return 1
        case _:
            assert_never(task)


class Gateway:
    """The app, with a model for each task."""

    def __init__(
        self,
        *,
        keys: tuple[str, ...] = (KEY,),
        aliases: tuple[AliasSettings, ...] = (),
        chunk_inputs_max: int = 3,
        models: tuple[Facts, ...] = MODELS,
        limits: GatewaySettings | None = None,
    ) -> None:
        dispatcher = Dispatcher(pending_requests_max=100, pending_bytes_max=100_000_000)
        self.queue = AnsweringQueue(dispatcher)
        dispatcher.attach(self.queue)
        catalog = Catalog.of(models, aliases)
        settings = Settings(
            gateway=limits or GatewaySettings(api_keys=keys), queue=QueueSettings(chunk_inputs_max=chunk_inputs_max)
        )
        self.canary = Canary(dispatcher, catalog.tasks(), interval_s=3600.0)  # a proof lasts for the whole test
        self.app: ASGIApp = build_app(settings, catalog=catalog, dispatcher=dispatcher, canary=self.canary)
        self._calls = Calls(
            catalog=catalog,
            dispatcher=dispatcher,
            canary=self.canary,
            gateway=settings.gateway,
            queue=settings.queue,
        )

    def operations(self) -> tuple[Operation, ...]:
        """The table that the app is made of."""
        return operations(self._calls, self.canary)

    def client(self, **headers: str) -> httpx.AsyncClient:
        """Sends the key, unless told to send another."""
        transport = httpx.ASGITransport(self.app)  # type: ignore[arg-type]  # the two ASGI types differ in name only
        return httpx.AsyncClient(
            transport=transport, base_url="http://appliance", headers={"authorization": f"Bearer {KEY}", **headers}
        )


def _embedded(task: Embed) -> list[Part]:
    count, width = inputs_of(task), task.width or WIDTH
    one = _floats([width**-0.5] * width)
    parts: dict[str, Part] = {
        "dense": Rows(one * count, width),
        "multivector": TokenRows((one * 2,) * count, width),
        "sparse": SparseRows((SparseRow(np.array([3, 5], "<i4").tobytes(), _floats([0.5, 1.5])),) * count),
    }
    return [parts[output] for output in task.outputs]


def _score(document: str) -> float:
    return float(document) if re.fullmatch(r"[01]\.\d+", document) else 0.5


def _spans(text: str, task: Extract) -> tuple[Span, ...]:
    if (task.labels and "PERSON" not in task.labels) or task.score_min > 0.875:
        return ()
    return tuple(Span(word.start(), word.end(), "PERSON", 0.875) for word in re.finditer(r"[A-ZÄÖÜ]\w*", text))


def _floats(values: Sequence[float]) -> bytes:
    return np.array(values, dtype="<f4").tobytes()
