"""The internal language: what the gateway asks (`Task` in a `Job`) and what a node answers (`Event` in a `Reply`).

Everything here crosses a process as msgpack. Structs are frozen; new fields go last and have defaults, and decoders are
deployed before encoders. Struct constraints are checked on decode only: the gateway validates before it builds a job.
Vectors travel as little-endian float32 bytes, never as numbers.
"""

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from appliance.errors import ApplianceError

Lane = Literal["interactive", "bulk"]
Intent = Literal["query", "document"]
# What to do with an input over the model's length: cut its end or its start, refuse it, or take the mean of the vectors
# of its pieces, weighted by their lengths.
Truncation = Literal["end", "start", "none", "chunk_mean"]
Output = Literal["dense", "sparse", "multivector"]


class Embed(msgspec.Struct, frozen=True, tag="embed", omit_defaults=True):
    """Turn each input into one vector, or into the other things that `outputs` names."""

    inputs: tuple[str, ...]
    intent: Intent | None = None  # which of the model's prompts to prepend; None is the model's default
    width: int | None = None  # of the dense vector: cut and normalized again; None is the model's own
    truncation: Truncation = "end"
    outputs: tuple[Output, ...] = ("dense",)  # none twice
    tokens_max: int | None = None  # cut each input to so many tokens; None is the model's length
    ids: tuple[bytes, ...] = ()  # instead of `inputs`: the model's own token ids, int32 little-endian


class Rerank(msgspec.Struct, frozen=True, tag="rerank", omit_defaults=True):
    """Say how relevant each document is to the query."""

    query: str
    documents: tuple[str, ...]
    document_tokens_max: int | None = None  # cut each document to so many tokens; None is the model's length
    truncation: Literal["end", "none"] = "end"  # of a query and document that are together over the model's length


class Classify(msgspec.Struct, frozen=True, tag="classify", omit_defaults=True):
    """Say how probable each of the model's labels is for each input."""

    inputs: tuple[str, ...]
    truncation: Truncation = "end"


class Extract(msgspec.Struct, frozen=True, tag="extract", omit_defaults=True):
    """Find the spans of each input that the model has labels for."""

    inputs: tuple[str, ...]
    labels: tuple[str, ...] = ()  # only these; all of the model's when empty
    score_min: float = 0.0
    truncation: Truncation = "end"


class Tokenize(msgspec.Struct, frozen=True, tag="tokenize"):
    """Cut one text into the model's tokens, without special ones."""

    text: str


class Detokenize(msgspec.Struct, frozen=True, tag="detokenize"):
    """The text of the model's token ids."""

    ids: tuple[int, ...]


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen; in OpenAI's words and ranges, with vLLM's and SGLang's names for what it lacks."""

    temperature: float = 1.0  # 0: always the most probable token
    top_p: float = 1.0
    top_k: int = 0  # 0: of all tokens
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None  # the same seed, request and model give the same text, whatever runs beside it
    logit_bias: tuple[tuple[int, float], ...] = ()  # by the served model's own token ids


class Generate(msgspec.Struct, frozen=True, tag="generate", omit_defaults=True):
    """Write one text: the next message of a chat, or what follows a prompt. Each choice of a request is a job."""

    # A JSON array of messages as `/v1/chat/completions` takes them, checked by the gateway and read in the node.
    messages: bytes = b""
    prompt: str = ""  # instead: a text to go on with, without a template
    ids: bytes = b""  # instead: the model's own token ids, int32 little-endian
    tools: bytes = b""  # a JSON array of `{"type": "function", "function": {…}}`
    tool_choice: Literal["none", "auto", "required"] = "auto"
    tool_name: str = ""  # the one function that must be called
    has_parallel_calls: bool = True  # more than one call in an answer
    form: Literal["text", "json_object", "json_schema", "regex"] = "text"
    pattern: bytes = b""  # the JSON schema of "json_schema", the expression of "regex"
    is_lenient: bool = False  # what of the schema cannot be enforced is not, instead of refused
    tokens_max: int | None = None  # of the answer; None: as many as the model's length leaves
    stop: tuple[str, ...] = ()  # the text ends before the first of these
    sampling: Sampling = Sampling()
    top_logprobs: int | None = None  # None: no log-probabilities; 0: of the chosen tokens only
    is_streamed: bool = False  # parts come as they are made; otherwise as one, with `Done`


class Question(msgspec.Struct, frozen=True, array_like=True):
    """One question of a `Decide`. A predicate has no options of its own: it is true or it is not."""

    kind: Literal["predicate", "choice", "score"]
    instructions: str
    options: tuple[str, ...] = ()  # of a score: its levels, lowest first


class Decide(msgspec.Struct, frozen=True, tag="decide"):
    """Say how probable each option of each question is, given the messages: one look at the model, no text."""

    messages: bytes  # as in `Generate`
    questions: tuple[Question, ...]


# Parked joins this union with the endpoints that need it.
Task = Embed | Rerank | Classify | Extract | Tokenize | Detokenize | Generate | Decide


class Job(msgspec.Struct, frozen=True, omit_defaults=True):
    """One chunk of one client request: the unit that is queued, delivered, settled and answered exactly once."""

    id: str
    model: str  # the served name, never an alias
    task: Task
    reply_to: str  # where the gateway listens
    deadline_s: float  # unix seconds; past it the work is dropped, not done
    lane: Lane = "interactive"
    first_index: int = (
        0  # index of the task's first input or document in the client's request, so that errors name the client's item
    )
    traceparent: str = ""  # W3C trace context, carried unread
    attempt_base: int = 0  # a resubmitted job outranks its earlier self: replies carry `attempt_base + delivery`
    version: int = 1


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Model tokens really computed, special tokens included, truncated ones left out."""

    input_tokens: int = 0
    output_tokens: int = 0  # the token that ends a text included
    cached_tokens: int = 0  # of the input: not computed again
    reasoning_tokens: int = 0  # of the output


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Consecutive vectors of one job: `len(data) == 4 * width * rows`, float32 little-endian, first row first."""

    data: bytes
    width: int


class TokenRows(msgspec.Struct, frozen=True, tag="token_rows"):
    """A "multivector" of each of consecutive inputs: one unit vector a token, float32 little-endian."""

    inputs: tuple[bytes, ...]
    width: int


class SparseRow(msgspec.Struct, frozen=True, array_like=True):
    """The non-zero weights of one text: vocabulary ids, ascending, as int32, and as many float32, little-endian."""

    indices: bytes
    values: bytes


class SparseRows(msgspec.Struct, frozen=True, tag="sparse_rows"):
    """The sparse vectors of consecutive inputs, which may be empty."""

    inputs: tuple[SparseRow, ...]


class Scores(msgspec.Struct, frozen=True, tag="scores"):
    """The relevance of consecutive documents of one `Rerank`, each in [0, 1]: float32 little-endian, 4 bytes each."""

    data: bytes


class Labels(msgspec.Struct, frozen=True, tag="labels"):
    """Probabilities of consecutive inputs of one `Classify`: `len(names)` float32 little-endian an input."""

    names: tuple[str, ...]
    data: bytes
    are_independent: bool = False  # an input may have several of the labels, or none


class Span(msgspec.Struct, frozen=True, array_like=True):
    """`text[start:end]` of an input, in characters, is one `label`; `score` is the model's probability of it."""

    start: int
    end: int
    label: str
    score: float


class Spans(msgspec.Struct, frozen=True, tag="spans"):
    """The spans found in consecutive inputs of one `Extract`, in text order."""

    inputs: tuple[tuple[Span, ...], ...]


class Tokenized(msgspec.Struct, frozen=True, tag="tokenized"):
    """The tokens of a `Tokenize`: their ids, and each as the vocabulary spells it ("##ing", "Ġthe")."""

    ids: tuple[int, ...]
    pieces: tuple[str, ...]


class Text(msgspec.Struct, frozen=True, tag="text"):
    """The text of a `Detokenize`."""

    text: str


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A token and its log-probability. `data` are the bytes it stands for, which may be a part of a character."""

    data: bytes
    logprob: float


class Chosen(msgspec.Struct, frozen=True, array_like=True):
    """A token of the answer, and the most probable ones at its place, best first."""

    data: bytes
    logprob: float
    top: tuple[Candidate, ...] = ()
    id: int = -1  # of the model's vocabulary; -1: not told


class CallPart(msgspec.Struct, frozen=True, array_like=True):
    """Of the `index`-th function call of an answer: its name, which comes first and once, then its JSON arguments."""

    index: int
    name: str = ""
    arguments: str = ""


class Delta(msgspec.Struct, frozen=True, tag="delta", omit_defaults=True):
    """What comes next of a `Generate`. Text never ends within a character, nor with a part of a stop string.

    Log-probabilities are of the tokens that its text is made of.
    """

    text: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    logprobs: tuple[Chosen, ...] = ()


class Beat(msgspec.Struct, frozen=True, tag="beat", omit_defaults=True):
    """A streamed job that has begun lives on. One comes a second at least; no part of the answer.

    One that names a `model` is of no job: a node tells all gateways that it has just answered one.
    """

    model: str = ""


class Weights(msgspec.Struct, frozen=True, tag="weights"):
    """Of consecutive questions of a `Decide`: the probabilities of the options, float32 little-endian.

    A predicate has one, of its being true; the others one an option, which sum to 1.
    """

    questions: tuple[bytes, ...]


# Why a text ended: by itself or before a stop string, at a limit of tokens, or with function calls.
Finish = Literal["stop", "length", "tool_calls"]


class Done(msgspec.Struct, frozen=True, tag="done", omit_defaults=True):
    """The job is complete; every part of its answer has been sent."""

    usage: Usage = Usage()
    truncated: tuple[int, ...] = ()  # indices (of the client's request) of inputs that were cut
    space: str = ""  # of an `Embed`: what vectors must share to be compared, see `workers/vector_space.py`
    finish: Finish = "stop"  # of a `Generate`
    stop: str = ""  # the stop string before which it ended
    tokens_max: int = 0  # of a `Generate`: what its node lets a prompt and its text have together


class Failed(msgspec.Struct, frozen=True, tag="failed", omit_defaults=True):
    """The job failed as a whole; `code` names a class of `appliance.errors`."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None

    @classmethod
    def of(cls, error: ApplianceError) -> "Failed":
        """Put an error into words that cross a process."""
        return cls(error.code, error.message, error.param, error.retry_after_s)

    def error(self) -> ApplianceError:
        """The error this event carries, of its own class again."""
        return ApplianceError.restore(self.code, self.message, param=self.param, retry_after_s=self.retry_after_s)


# Of an answer.
Part = Rows | TokenRows | SparseRows | Scores | Labels | Spans | Tokenized | Text | Delta | Weights
Event = Part | Beat | Done | Failed


class Reply(msgspec.Struct, frozen=True):
    """One event of one attempt at one job; `seq` counts from 0 within the attempt, without gaps.

    `attempt` is the job's `attempt_base` plus the number of the delivery: a higher one replaces all lower ones.
    """

    job_id: str
    attempt: int
    seq: int
    event: Event


class Cancel(msgspec.Struct, frozen=True):
    """Nobody waits for these jobs any more; nodes drop what they have not computed."""

    job_ids: tuple[str, ...]


CANARY_PREFIX: Final = "canary-"


def is_canary(job_id: str) -> bool:
    """Whether a gateway asks on its own behalf, to see whether a model answers. Figures of traffic leave these out."""
    return job_id.startswith(CANARY_PREFIX)


_encoder = msgspec.msgpack.Encoder()
_job_decoder = msgspec.msgpack.Decoder(Job)
_replies_decoder = msgspec.msgpack.Decoder(list[Reply])
_cancel_decoder = msgspec.msgpack.Decoder(Cancel)


def encode_job(job: Job) -> bytes:
    """A job as the queue carries it."""
    return _encoder.encode(job)


def decode_job(payload: bytes) -> Job:
    """Raises `msgspec.ValidationError` or `msgspec.DecodeError` for a payload that is no job of ours."""
    return _job_decoder.decode(payload)


def encode_replies(replies: Sequence[Reply]) -> bytes:
    """Replies to one gateway, packed into one message: a batch often answers many of its jobs at once."""
    return _encoder.encode(replies)


def decode_replies(payload: bytes) -> list[Reply]:
    """The inverse of `encode_replies`; raises like `decode_job`."""
    return _replies_decoder.decode(payload)


def encode_cancel(cancel: Cancel) -> bytes:
    """A cancellation as nodes receive it."""
    return _encoder.encode(cancel)


def decode_cancel(payload: bytes) -> Cancel:
    """The inverse of `encode_cancel`; raises like `decode_job`."""
    return _cancel_decoder.decode(payload)
