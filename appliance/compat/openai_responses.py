"""`POST /v1/responses`, stateless: body → `ResponsesCall` → one `Generate`, and what came of it → answer or stream.

Nothing is stored here: what refers to an earlier response or conversation is refused, and the rest of a conversation is
sent with each call.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from appliance.compat import items, responses_answer
from appliance.compat.bodies import BodyDecoder
from appliance.compat.formats import Format
from appliance.compat.generation import Generated
from appliance.compat.items import Item
from appliance.compat.json_bounds import UnreadObject
from appliance.compat.response_usage import ResponseUsage
from appliance.compat.responses_answer import (
    FunctionTool,
    IncompleteDetails,
    ReasoningSettings,
    Response,
    SchemaFormat,
    TextSettings,
)
from appliance.compat.responses_settings import (
    Choice,
    Text,
    Tool,
    function_tools,
    nested,
    offered_tools,
    text_settings,
    tool_choice,
)
from appliance.compat.responses_stream import ResponsesWriter
from appliance.errors import InvalidRequest, UnsupportedParameter
from appliance.jobs import Generate, Sampling

METADATA_MAX = 16
METADATA_KEY_CHARS_MAX = 64
METADATA_VALUE_CHARS_MAX = 512
TOP_LOGPROBS_MAX = 20
NAMES = (  # see `generation.Names`
    (r"messages.*", "input"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.parameters"),
    (r"response_format\.json_schema\.schema", "text.format.schema"),
    (r"response_format", "text.format"),
)

_LOGPROBS = "message.output_text.logprobs"
Includable = Literal[
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
    "reasoning.encrypted_content",
    "message.output_text.logprobs",
]


class Reasoning(msgspec.Struct, frozen=True):
    """How to think, which is the model's own affair here: it is echoed."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None


class CacheOptions(msgspec.Struct, frozen=True):
    """What to keep for later requests."""

    prewarm: bool | None = None


class ResponsesBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that OpenAI documents. Explicit nulls mean absent."""

    model: str
    input: str | list[Item]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_MAX)] | None = None
    include: list[Includable] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | Choice | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    stream: bool | None = None
    stream_options: UnreadObject | None = None  # only of the obfuscation, which there is none of
    metadata: dict[str, str] | None = None
    reasoning: Reasoning | None = None
    # Change nothing here.
    access_programs: UnreadObject | None = None
    background_options: UnreadObject | None = None
    image: UnreadObject | None = None
    max_tool_calls: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None  # of hosted tools
    prompt_cache_key: str | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    user: str | None = None
    # Are refused, unless they ask for what happens anyway.
    background: bool | None = None
    context_management: list[msgspec.Raw] | None = None
    conversation: str | UnreadObject | None = None
    moderation: UnreadObject | None = None
    previous_response_id: str | None = None
    prompt: UnreadObject | None = None
    truncation: Literal["auto", "disabled"] | None = None


class ResponsesCall(msgspec.Struct, frozen=True):
    """A checked request; see `GenerationCall`."""

    body: ResponsesBody
    tools: tuple[FunctionTool, ...]
    text: TextSettings
    task: Generate
    ignored: tuple[str, ...]

    @property
    def model(self) -> str | None:
        """As the client wrote it."""
        return self.body.model

    @property
    def tasks(self) -> Sequence[Generate]:
        """The one text."""
        return (self.task,)

    @property
    def is_streamed(self) -> bool:
        """Whether the client wants events."""
        return self.task.is_streamed

    def answer(self, choices: Sequence[Generated], *, model: str, created_s: int) -> Response:
        """The whole response."""
        (generated,) = choices
        is_cut = generated.finish == "length"
        return msgspec.structs.replace(
            self._begun(model, created_s),
            status="incomplete" if is_cut else "completed",
            incomplete_details=IncompleteDetails("max_output_tokens") if is_cut else None,
            output=responses_answer.items(generated),
            usage=ResponseUsage.of(generated.usage),
        )

    def writer(self, *, model: str, created_s: int) -> ResponsesWriter:
        """Of the events."""
        return ResponsesWriter(self._begun(model, created_s))

    def _begun(self, model: str, created_s: int) -> Response:
        """What is known before the model is asked: the request's settings, as they are applied."""
        body = self.body
        reasoning = body.reasoning or Reasoning()
        return Response(
            id=responses_answer.new_id("resp"),
            created_at=created_s,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            max_tool_calls=body.max_tool_calls,
            model=model,
            parallel_tool_calls=self.task.has_parallel_calls,
            prompt_cache_key=body.prompt_cache_key,
            reasoning=ReasoningSettings(reasoning.effort, reasoning.summary or reasoning.generate_summary),
            safety_identifier=body.safety_identifier,
            temperature=self.task.sampling.temperature,
            text=self.text,
            tool_choice=tool_choice(body.tool_choice),
            tools=list(self.tools),
            top_logprobs=self.task.top_logprobs or 0,
            top_p=self.task.sampling.top_p,
            user=body.user,
            metadata=body.metadata or {},
        )


_bodies = BodyDecoder(ResponsesBody)
_encoder = msgspec.json.Encoder()


def decode(body: bytes, form: Format = "json") -> ResponsesCall:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body, form)
    _check_served(fields)
    _check_metadata(fields.metadata)
    tools = function_tools(fields.tools or ())
    text = text_settings(fields.text or Text())
    unheeded = {"reasoning": fields.reasoning, "text.verbosity": fields.text and fields.text.verbosity}
    ignored += tuple(name for name, value in unheeded.items() if value is not None)
    return ResponsesCall(fields, tools, text, _task(fields, tools, text), ignored)


def _check_served(body: ResponsesBody) -> None:
    """Raises UnsupportedParameter for a field that would change the answer."""
    stored = "nothing is stored here: send the whole conversation as 'input'"
    refused = {
        "background": "answers are given at once; leave it out" if body.background else None,
        "context_management": "nothing is left out of 'input' here" if body.context_management else None,
        "conversation": stored if body.conversation is not None else None,
        "moderation": "nothing is moderated here" if body.moderation is not None else None,
        "previous_response_id": stored if body.previous_response_id is not None else None,
        "prompt": "no prompts are stored here: send 'instructions' and 'input'" if body.prompt is not None else None,
        "truncation": "'input' is never cut here; send 'disabled'" if body.truncation == "auto" else None,
        "prompt_cache_options.prewarm": (
            "a text is always generated" if body.prompt_cache_options and body.prompt_cache_options.prewarm else None
        ),
    }
    for name, why in refused.items():
        if why is not None:
            raise UnsupportedParameter(f"'{name}' is not served: {why}", param=name)


def _check_metadata(metadata: dict[str, str] | None) -> None:
    """Its limits are OpenAI's: it is echoed."""
    if metadata is None:
        return
    if len(metadata) > METADATA_MAX:
        raise InvalidRequest(f"'metadata' has {len(metadata)} pairs, the limit is {METADATA_MAX}", param="metadata")
    for key, value in metadata.items():
        if len(key) > METADATA_KEY_CHARS_MAX or len(value) > METADATA_VALUE_CHARS_MAX:
            raise InvalidRequest(
                f"'metadata' has a pair of {len(key)} and {len(value)} characters, the limits are "
                f"{METADATA_KEY_CHARS_MAX} and {METADATA_VALUE_CHARS_MAX}",
                param="metadata",
            )


def _task(body: ResponsesBody, tools: Sequence[FunctionTool], text: TextSettings) -> Generate:
    choice = tool_choice(body.tool_choice)
    offered, mode, tool_name = offered_tools(tools, choice)
    asked = (body.text or Text()).format
    wants_logprobs = _LOGPROBS in (body.include or ()) or body.top_logprobs
    return Generate(
        messages=items.messages(body.input, instructions=body.instructions),
        tools=nested(offered) if offered else b"",
        tool_choice=mode,
        tool_name=tool_name,
        has_parallel_calls=body.parallel_tool_calls is not False,
        form="text" if asked is None else asked.type,
        pattern=_encoder.encode(text.format.schema) if isinstance(text.format, SchemaFormat) else b"",
        is_lenient=isinstance(text.format, SchemaFormat) and not text.format.strict,
        tokens_max=body.max_output_tokens,
        sampling=Sampling(
            temperature=1.0 if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
        ),
        top_logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        is_streamed=bool(body.stream),
    )
