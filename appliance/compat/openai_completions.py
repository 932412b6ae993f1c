"""`POST /v1/completions`, the older endpoint: prompts are gone on with as they are, without a chat template."""

import codecs
from collections.abc import Sequence
from typing import Annotated, Literal, cast

import msgspec
from msgspec import Meta

from appliance.compat import openai_errors, sse, token_ids
from appliance.compat.bodies import BodyDecoder
from appliance.compat.generation import Generated
from appliance.compat.json_bounds import UnreadObject
from appliance.compat.openai_chat import CHOICES_MAX, Penalty, StreamOptions, choices_of
from appliance.compat.openai_chat_answer import ChatUsage, new_id
from appliance.compat.sampling import REPETITION_PENALTY_MIN, StopField, checked_bias, checked_stop, seed_of
from appliance.errors import ApplianceError, InvalidRequest, UnsupportedParameter
from appliance.jobs import Chosen, Delta, Done, Generate, Sampling, Usage

PROMPTS_MAX = 128
CHOICES_IN_ALL_MAX = 128
LOGPROBS_MAX = 5
TOKENS_MAX = 16  # of an answer, where the client leaves it open: OpenAI's own


class CompletionBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that OpenAI documents, and those that vLLM and SGLang add. Explicit nulls mean absent."""

    model: str
    prompt: str | list[str | int | list[int]] | None = None
    best_of: int | None = None
    echo: bool | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=LOGPROBS_MAX)] | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopField = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    suffix: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=REPETITION_PENALTY_MIN, le=2)] | None = None
    user: str | None = None
    metadata: UnreadObject | None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """Of each token: its text, what was probable, itself included, and where in the whole text it begins.

    A token that is a part of a character only is told by its bytes: `bytes:\\xf0\\x9f`, as OpenAI does it.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(msgspec.Struct, frozen=True):
    """One text, or a part of it."""

    text: str
    index: int
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class CompletionAnswer(msgspec.Struct, frozen=True):
    """OpenAI's text completion, whole or a chunk of one."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: None = None
    usage: ChatUsage | msgspec.UnsetType | None = msgspec.UNSET


class CompletionCall(msgspec.Struct, frozen=True):
    """A checked request; see `GenerationCall`. The choices of a prompt follow each other."""

    body: CompletionBody
    tasks: tuple[Generate, ...]
    ignored: tuple[str, ...]

    @property
    def model(self) -> str | None:
        """As the client wrote it."""
        return self.body.model

    @property
    def is_streamed(self) -> bool:
        """Whether the client wants chunks."""
        return bool(self.body.stream)

    @property
    def prefixes(self) -> list[str]:
        """What each choice begins with."""
        return [task.prompt if self.body.echo else "" for task in self.tasks]

    def answer(self, choices: Sequence[Generated], *, model: str, created_s: int) -> CompletionAnswer:
        """The whole answer."""
        found = [
            CompletionChoice(
                prefix + choice.text,
                index,
                _Places().logprobs(choice.logprobs) if self.body.logprobs is not None else None,
                _finish(choice.finish),
            )
            for index, (choice, prefix) in enumerate(zip(choices, self.prefixes, strict=True))
        ]
        usage = self.usage([choice.usage for choice in choices])
        return CompletionAnswer(new_id("cmpl-"), "text_completion", created_s, model, found, usage=ChatUsage.of(usage))

    def writer(self, *, model: str, created_s: int) -> "CompletionWriter":
        """Of the chunks."""
        return CompletionWriter(self, model=model, created_s=created_s)

    def usage(self, usages: Sequence[Usage]) -> Usage:
        """Of all choices; the tokens of each prompt count once."""
        firsts = usages[:: self.body.n or 1]
        return Usage(
            input_tokens=sum(usage.input_tokens for usage in firsts),
            output_tokens=sum(usage.output_tokens for usage in usages),
            cached_tokens=sum(usage.cached_tokens for usage in firsts),
            reasoning_tokens=sum(usage.reasoning_tokens for usage in usages),
        )


_bodies = BodyDecoder(CompletionBody)


def decode(body: bytes) -> CompletionCall:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault.

    Blocks where prompts are token ids, for seconds the first time; see `token_ids`.
    """
    fields, ignored = _bodies.decode(body)
    count = fields.n or 1
    if fields.suffix:
        raise UnsupportedParameter("'suffix' is not served; leave it out", param="suffix")
    if fields.best_of not in (None, 1, count):
        raise UnsupportedParameter("'best_of' can only be 1, or 'n'; leave it out", param="best_of")
    if fields.echo and fields.logprobs is not None:
        raise UnsupportedParameter(
            "'echo' does not go with 'logprobs': a prompt's log-probabilities are not served", param="echo"
        )
    prompts = _prompts(fields)
    if len(prompts) * count > CHOICES_IN_ALL_MAX:
        raise InvalidRequest(
            f"{len(prompts)} prompts of {count} choices are over the limit of {CHOICES_IN_ALL_MAX}", param="n"
        )
    common = Generate(
        tokens_max=fields.max_tokens or TOKENS_MAX,
        stop=checked_stop(fields.stop),
        sampling=Sampling(
            temperature=1.0 if fields.temperature is None else fields.temperature,
            top_p=1.0 if fields.top_p is None else fields.top_p,
            top_k=max(0, fields.top_k or 0),
            min_p=fields.min_p or 0.0,
            frequency_penalty=fields.frequency_penalty or 0.0,
            presence_penalty=fields.presence_penalty or 0.0,
            repetition_penalty=fields.repetition_penalty or 1.0,
            seed=None if fields.seed is None else seed_of(fields.seed),
            logit_bias=checked_bias(fields.logit_bias),
        ),
        top_logprobs=fields.logprobs,
        is_streamed=bool(fields.stream),
    )
    tasks = [task for prompt in prompts for task in choices_of(msgspec.structs.replace(common, prompt=prompt), count)]
    return CompletionCall(fields, tuple(tasks), ignored)


def _prompts(body: CompletionBody) -> tuple[str, ...]:
    """Texts; ids are read as the text that the client had. Raises InvalidRequest for none, or an empty one."""
    prompt = body.prompt
    if prompt is None:
        raise InvalidRequest("missing required field 'prompt'", param="prompt")
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not prompts or not all(text != "" for text in prompts):
        raise InvalidRequest("'prompt' is empty; send some text", param="prompt")
    are_several = not isinstance(prompts[0], int)
    if are_several and len(prompts) > PROMPTS_MAX:
        raise InvalidRequest(f"'prompt' has {len(prompts)} texts, the limit is {PROMPTS_MAX}", param="prompt")
    if not isinstance(prompts[0], str):
        return _texts(prompts, body.model)
    if not all(isinstance(text, str) for text in prompts):
        raise InvalidRequest("'prompt' is of texts, or of token ids, not of both", param="prompt")
    return tuple(cast("list[str]", prompts))


def _texts(ids: Sequence[object], model: str) -> tuple[str, ...]:
    try:
        return token_ids.texts(token_ids.arrays(ids), model=model)
    except InvalidRequest as error:
        message = error.message.replace("'input", "'prompt")
        raise type(error)(message, param=(error.param or "prompt").replace("input", "prompt")) from error


def _finish(finish: str) -> Literal["stop", "length"]:
    return "length" if finish == "length" else "stop"


class _Places:
    """Says where in a text its tokens begin, in characters."""

    def __init__(self) -> None:
        self._offset = 0
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def logprobs(self, chosen: Sequence[Chosen]) -> CompletionLogprobs:
        """Those of the next tokens."""
        offsets: list[int] = []
        for each in chosen:
            offsets.append(self._offset)
            self._offset += len(self._characters.decode(each.data))
        return CompletionLogprobs(
            [_spelled(each.data) for each in chosen],
            [each.logprob for each in chosen],
            [
                {_spelled(other.data): other.logprob for other in each.top} | {_spelled(each.data): each.logprob}
                for each in chosen
            ],
            offsets,
        )


def _spelled(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


class CompletionWriter:
    """Writes the chunks of one request."""

    content_type = sse.EVENT_STREAM
    takes_pings = True

    def __init__(self, call: CompletionCall, *, model: str, created_s: int) -> None:
        options = call.body.stream_options
        self._call = call
        self._id = new_id("cmpl-")
        self._model = model
        self._created_s = created_s
        self._has_usage = options is not None and bool(options.include_usage)
        self._usages: dict[int, Usage] = {}
        self._places = [_Places() for _ in call.prefixes]

    def start(self) -> bytes:
        """What is echoed."""
        return b"".join(
            self._chunk(CompletionChoice(prefix, index, None, None))
            for index, prefix in enumerate(self._call.prefixes)
            if prefix
        )

    def delta(self, choice: int, delta: Delta) -> bytes:
        """The next part of a choice."""
        logprobs = self._places[choice].logprobs(delta.logprobs) if delta.logprobs else None
        return self._chunk(CompletionChoice(delta.text, choice, logprobs, None))

    def finish(self, choice: int, done: Done) -> bytes:
        """A choice is complete."""
        self._usages[choice] = done.usage
        return self._chunk(CompletionChoice("", choice, None, _finish(done.finish)))

    def end(self) -> bytes:
        """All are."""
        if not self._has_usage:
            return sse.DONE
        usage = self._call.usage([self._usages[choice] for choice in sorted(self._usages)])
        return self._event([], ChatUsage.of(usage)) + sse.DONE

    def error(self, error: ApplianceError) -> bytes:
        """The stream ends here, without `[DONE]`."""
        return sse.data(openai_errors.body(error))

    def _chunk(self, choice: CompletionChoice) -> bytes:
        return self._event([choice], None if self._has_usage else msgspec.UNSET)

    def _event(self, choices: list[CompletionChoice], usage: ChatUsage | msgspec.UnsetType | None) -> bytes:
        return sse.data(
            CompletionAnswer(self._id, "text_completion", self._created_s, self._model, choices, usage=usage)
        )
