"""The gateway in process, over a queue that answers every kind of task at once and predictably."""

import asyncio
import re
from collections.abc import Sequence
from typing import assert_never

import httpx
import msgspec
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
    CallPart,
    Candidate,
    Chosen,
    Classify,
    Decide,
    Delta,
    Detokenize,
    Done,
    Embed,
    Event,
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
    Weights,
    decode_job,
    encode_replies,
)
from appliance.presets import Facts
from appliance.settings import AliasSettings, GatewaySettings, QueueSettings, Settings

KEY = "sk-the-key"
WIDTH = 4
TOKENS_OF_AN_INPUT = 10
ARGUMENTS = '{"city": "Köln"}'  # of every function call
LABEL_NAMES = ("negative", "positive")
MODELS = (
    Facts("org/embedder", tasks=("embed",), width=WIDTH, outputs=("dense", "sparse", "multivector")),
    Facts("org/ranker", tasks=("rerank",), aliases=("rerank-v3.5",)),
    Facts("org/classifier", tasks=("classify",)),
    Facts("org/finder", tasks=("extract",)),
    Facts("org/writer", tasks=("generate",), aliases=("gpt-4o-mini",)),
)
MESSAGES = [{"role": "user", "content": "one two"}]
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
    "/v1/chat/completions": {"model": "org/writer", "messages": MESSAGES},
    "/openai/deployments/{name}/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"model": "org/writer", "prompt": "one two"},
    "/openai/deployments/{name}/completions": {"prompt": "one two"},
    "/v1/responses": {"model": "org/writer", "input": "one two"},
    "/v1/decisions": {
        "model": "org/writer",
        "input": "one two",
        "questions": [{"type": "predicate", "instructions": "is it one?"}],
    },
    "/v2/chat": {"model": "org/writer", "messages": MESSAGES},
    "/v1/chat": {"model": "org/writer", "message": "one two"},
}


def url_of(path: str) -> str:
    """A path of the table with a model's name in it, where it takes one."""
    return path.replace("{name}", "org/embedder" if path.endswith("/embeddings") else "org/writer")


class AnsweringQueue:
    """Answers each job at once, with `answer_to`'s parts; or with `failure`, or as the test says (`say`)."""

    reply_to = "replies.here"
    payload_bytes_max = 8_000_000
    is_connected = True

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.jobs: list[Job] = []
        self.failure: Failed | None = None
        self.truncated: tuple[int, ...] = ()
        self.space = ""
        self.tokens_max = 0  # of a prompt and its text
        self.parts: list[Part] | None = None  # instead of what belongs to the task
        self.is_silent = False  # nothing is answered but what `say` is told to
        self.cancelled: list[str] = []
        self._said: dict[str, int] = {}
        self._dispatcher = dispatcher

    async def submit(self, *, job_id: str, message_id: str, model: str, lane: Lane, payload: bytes) -> None:
        job = decode_job(payload)
        self.jobs.append(job)
        if self.is_silent:
            return
        parts = answer_to(job.task) if self.parts is None else self.parts
        events = [*parts, self.done(job)] if self.failure is None else [self.failure]
        asyncio.get_running_loop().call_soon(self.say, job_id, *events)

    async def cancel(self, job_ids: Sequence[str]) -> None:
        self.cancelled += job_ids

    def say(self, job_id: str, *events: Event) -> None:
        """The next events of a job, as a node would send them."""
        first = self._said.get(job_id, 0)
        self._said[job_id] = first + len(events)
        replies = [Reply(job_id, 1, seq, event) for seq, event in enumerate(events, first)]
        self._dispatcher.on_replies(encode_replies(replies))

    def done(self, job: Job) -> Done:
        """The end of a job's answer."""
        if isinstance(job.task, Generate):
            return msgspec.structs.replace(ending_of(job.task), tokens_max=self.tokens_max)
        numbers = range(job.first_index, job.first_index + inputs_of(job.task))
        return Done(
            Usage(TOKENS_OF_AN_INPUT * len(numbers)),
            tuple(number for number in self.truncated if number in numbers),
            self.space,
        )


def answer_to(task: Task) -> list[Part]:  # noqa: PLR0911  # a table
    """Vectors of ones; a document that is a number is as relevant as that; capital words are persons.

    What is written are the words of the last message or prompt again, each a token and a part; or a call of the first
    function, where one must be called. Everything asked of it is as probable as everything else.
    """
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
        case Generate():
            deltas = _deltas(task)
            return [*deltas] if task.is_streamed else [_merged(deltas)]
        case Decide(questions=questions):
            options = [max(1, len(question.options)) for question in questions]
            return [Weights(tuple(_floats([1 / max(2, count)] * count) for count in options))]
        case _:
            assert_never(task)


def ending_of(task: Generate) -> Done:
    """How a text ends: with a call, before a stop string, at the limit, or by itself."""
    words = _words(task)
    tokens = len(_cut(words, task))
    usage = Usage(TOKENS_OF_AN_INPUT, output_tokens=tokens + 1)
    if _must_call(task):
        return Done(usage, finish="tool_calls")
    if task.tokens_max is not None and len(words) > task.tokens_max:
        return Done(Usage(TOKENS_OF_AN_INPUT, output_tokens=tokens), finish="length")
    stop = next((word.strip() for word in words if word.strip() in task.stop), "")
    return Done(usage, stop=stop)


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
        self.give_up = dispatcher.give_up
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


class _Tool(msgspec.Struct, frozen=True):
    function: dict[str, msgspec.Raw]


class _Said(msgspec.Struct, frozen=True):
    content: str | list[dict[str, str]] | None = None


def _words(task: Generate) -> list[str]:
    """With the space before each."""
    text = task.prompt
    if task.messages:
        content = msgspec.json.decode(task.messages, type=list[_Said])[-1].content or ""
        text = content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)
    return re.findall(r"^\S+|\s+\S+", text) or ["nothing"]


def _cut(words: Sequence[str], task: Generate) -> list[str]:
    kept = words[: task.tokens_max]
    ends = [number for number, word in enumerate(kept) if word.strip() in task.stop]
    return list(kept[: ends[0]] if ends else kept)


def _must_call(task: Generate) -> bool:
    return task.tool_choice == "required"


def _deltas(task: Generate) -> list[Delta]:
    if _must_call(task):
        tool = msgspec.json.decode(task.tools, type=list[_Tool])[0]
        name = task.tool_name or msgspec.json.decode(tool.function["name"], type=str)
        return [Delta(calls=(CallPart(0, name),)), Delta(calls=(CallPart(0, arguments=ARGUMENTS),))]
    return [
        Delta(word, logprobs=() if task.top_logprobs is None else (_chosen(word, task.top_logprobs),))
        for word in _cut(_words(task), task)
    ]


def _chosen(word: str, top: int) -> Chosen:
    data = word.encode()
    return Chosen(data, -0.5, tuple(Candidate(data, -0.5 - number) for number in range(top)), id=len(data))


def _merged(deltas: Sequence[Delta]) -> Delta:
    return Delta(
        "".join(delta.text for delta in deltas),
        calls=tuple(part for delta in deltas for part in delta.calls),
        logprobs=tuple(chosen for delta in deltas for chosen in delta.logprobs),
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
