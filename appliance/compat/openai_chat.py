"""`POST /v1/chat/completions`: body → `ChatCall` → a `Generate` a choice, and what came of them → answer or stream."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from appliance.compat import chat_messages, chat_tools
from appliance.compat.bodies import BodyDecoder, decoded_part
from appliance.compat.chat_messages import Message
from appliance.compat.chat_tools import Choice, Function, NamedFunction, Offer, Tool
from appliance.compat.generation import Generated, total
from appliance.compat.json_bounds import JsonObject, UnreadObject
from appliance.compat.openai_chat_answer import ChatAnswer, ChatUsage, choice_of, new_id
from appliance.compat.openai_chat_stream import ChatWriter
from appliance.compat.responses_settings import check_schema, checked_name
from appliance.compat.sampling import REPETITION_PENALTY_MIN, StopField, checked_bias, checked_stop, seed_of
from appliance.errors import InvalidRequest, UnsupportedParameter
from appliance.jobs import Generate, Sampling

CHOICES_MAX = 16
TOP_LOGPROBS_MAX = 20

Tokens = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]


class JsonSchema(msgspec.Struct, frozen=True):
    """The form of an answer, with a name."""

    name: str | None = None
    schema: JsonObject | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """The form of an answer. "regex", with its `pattern`, is ours."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    pattern: str | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """What a stream has besides the text."""

    include_usage: bool | None = None


class ChatBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that OpenAI documents, and those that vLLM and SGLang add. Explicit nulls mean absent."""

    model: str
    messages: Annotated[msgspec.Raw, Meta(extra_json_schema=chat_messages.SCHEMA)]
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    max_tokens: Tokens | None = None
    max_completion_tokens: Tokens | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopField = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    functions: list[Function] | None = None
    function_call: Literal["none", "auto"] | NamedFunction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(ge=REPETITION_PENALTY_MIN, le=2)] | None = None
    # Change nothing here.
    metadata: UnreadObject | None = None
    prediction: UnreadObject | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: UnreadObject | None = None
    prompt_cache_retention: str | None = None
    reasoning_effort: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None
    verbosity: str | None = None
    # Are refused, unless they ask for what happens anyway.
    audio: UnreadObject | None = None
    modalities: list[str] | None = None
    moderation: UnreadObject | None = None
    web_search_options: UnreadObject | None = None


class ChatCall(msgspec.Struct, frozen=True):
    """A checked request; see `GenerationCall`."""

    body: ChatBody
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
    def is_legacy(self) -> bool:
        """Whether functions were offered as they were before tools."""
        return bool(self.body.functions)

    def answer(self, choices: Sequence[Generated], *, model: str, created_s: int) -> ChatAnswer:
        """The whole answer."""
        return ChatAnswer(
            id=new_id("chatcmpl-"),
            object="chat.completion",
            created=created_s,
            model=model,
            choices=[
                choice_of(index, choice, is_legacy=self.is_legacy, has_logprobs=bool(self.body.logprobs))
                for index, choice in enumerate(choices)
            ],
            usage=ChatUsage.of(total([choice.usage for choice in choices])),
        )

    def writer(self, *, model: str, created_s: int) -> ChatWriter:
        """Of the chunks."""
        options = self.body.stream_options
        return ChatWriter(
            model=model,
            created_s=created_s,
            choices=len(self.tasks),
            is_legacy=self.is_legacy,
            has_usage=options is not None and bool(options.include_usage),
        )


_bodies = BodyDecoder(ChatBody)
_messages = msgspec.json.Decoder(list[Message])


def decode(body: bytes) -> ChatCall:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body)
    _check_served(fields)
    messages = decoded_part(fields.messages, _messages, "messages")
    chat_messages.check(messages)
    if fields.top_logprobs is not None and not fields.logprobs:
        raise InvalidRequest("'top_logprobs' needs 'logprobs' to be true", param="top_logprobs")
    offer = _offer(fields)
    form, pattern = _form(fields.response_format)
    unheeded = {"reasoning_effort": fields.reasoning_effort, "verbosity": fields.verbosity}
    ignored += tuple(name for name, value in unheeded.items() if value is not None)
    task = Generate(
        messages=bytes(fields.messages),
        tools=offer.tools,
        tool_choice=offer.mode,
        tool_name=offer.name,
        has_parallel_calls=fields.parallel_tool_calls is not False and not fields.functions,
        form=form,
        pattern=pattern,
        is_lenient=form == "json_schema" and not _is_strict(fields.response_format),
        tokens_max=fields.max_completion_tokens or fields.max_tokens,
        stop=checked_stop(fields.stop),
        sampling=_sampling(fields),
        top_logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        is_streamed=bool(fields.stream),
    )
    return ChatCall(fields, choices_of(task, fields.n or 1), ignored)


def choices_of(task: Generate, count: int) -> tuple[Generate, ...]:
    """So many texts of one prompt, each with a seed of its own where there is one."""
    if count == 1:
        return (task,)
    sampling = task.sampling
    return tuple(
        msgspec.structs.replace(
            task,
            sampling=sampling
            if sampling.seed is None
            else msgspec.structs.replace(sampling, seed=seed_of(sampling.seed + number)),
        )
        for number in range(count)
    )


def _check_served(body: ChatBody) -> None:
    """Raises UnsupportedParameter for a field that would change the answer."""
    for name in ("audio", "moderation", "web_search_options"):
        if getattr(body, name) is not None:
            raise UnsupportedParameter(f"'{name}' is not served; leave it out", param=name)
    if body.modalities is not None and body.modalities != ["text"]:
        raise UnsupportedParameter("'modalities' can only be [\"text\"] here", param="modalities")


def _offer(body: ChatBody) -> Offer:
    """Of tools, or of functions as they were before. Raises InvalidRequest for both."""
    if body.functions:
        for name in ("tools", "tool_choice"):
            if getattr(body, name) is not None:
                raise InvalidRequest(f"'functions' cannot go with '{name}'; leave out one of them", param=name)
        return chat_tools.legacy(body.functions, body.function_call)
    if body.function_call not in (None, "none", "auto"):
        raise InvalidRequest("'function_call' is only allowed with 'functions'", param="function_call")
    return chat_tools.offer(body.tools, body.tool_choice)


def _form(wanted: ResponseFormat | None) -> tuple[Literal["text", "json_object", "json_schema", "regex"], bytes]:
    if wanted is None:
        return "text", b""
    match wanted.type:
        case "json_schema":
            schema = wanted.json_schema
            if schema is None:
                raise _missing("response_format.json_schema")
            checked_name(schema.name, "response_format.json_schema.name")
            if schema.schema is None:
                raise _missing("response_format.json_schema.schema")
            check_schema(schema.schema, "response_format.json_schema.schema")
            return "json_schema", msgspec.json.encode(schema.schema)
        case "regex":
            if not wanted.pattern:
                raise _missing("response_format.pattern")
            return "regex", wanted.pattern.encode()
        case other:
            return other, b""


def _is_strict(wanted: ResponseFormat | None) -> bool:
    return wanted is not None and wanted.json_schema is not None and bool(wanted.json_schema.strict)


def _missing(field: str) -> InvalidRequest:
    return InvalidRequest(f"missing required field '{field}'", param=field)


def _sampling(body: ChatBody) -> Sampling:
    top_k = body.top_k or 0
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, top_k),
        min_p=body.min_p or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        seed=None if body.seed is None else seed_of(body.seed),
        logit_bias=checked_bias(body.logit_bias),
    )
