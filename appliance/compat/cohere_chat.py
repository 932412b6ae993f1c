"""`POST /v2/chat` in Cohere's dialect: body → `CohereChatCall` → one `Generate` → answer or stream."""

import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.compat import chat_tools
from appliance.compat.bodies import BodyDecoder
from appliance.compat.chat_tools import Tool
from appliance.compat.cohere_chat_stream import CohereChatWriter
from appliance.compat.cohere_generation import (
    called,
    documents_text,
    finish_of,
    form_of,
    sampling_of,
    stops_of,
    written_messages,
)
from appliance.compat.generation import Generated
from appliance.compat.items import Message, TextPart
from appliance.compat.json_bounds import JsonObject
from appliance.errors import InvalidRequest, UnsupportedParameter
from appliance.jobs import Generate

Penalty = Annotated[float, Meta(ge=0, le=1)]
Natural = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class Document(msgspec.Struct, frozen=True):
    """What may help to answer."""

    data: JsonObject | str
    id: str | None = None


class Part(msgspec.Struct, frozen=True):
    """A part of a content; only text and documents are read."""

    type: str
    text: str | None = None
    document: Document | None = None


class CalledFunction(msgspec.Struct, frozen=True):
    """A function, and its arguments as JSON."""

    name: str | None = None
    arguments: str | None = None


class CalledTool(msgspec.Struct, frozen=True):
    """What the assistant called."""

    id: str | None = None
    function: CalledFunction | None = None
    type: str = "function"


class CohereMessage(msgspec.Struct, frozen=True):
    """One message."""

    role: Literal["user", "assistant", "system", "tool"]
    content: str | list[Part] | None = None
    tool_calls: list[CalledTool] | None = None
    tool_plan: str | None = None
    tool_call_id: str | None = None


class CohereFormat(msgspec.Struct, frozen=True):
    """The form of the answer."""

    type: Literal["text", "json_object"]
    schema: JsonObject | None = None
    json_schema: JsonObject | None = None


class CohereChatBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields Cohere documents. Explicit nulls mean absent."""

    model: str
    messages: list[CohereMessage]
    stream: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    strict_tools: bool | None = None
    documents: list[str | Document] | None = None
    response_format: CohereFormat | None = None
    max_tokens: Natural | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    k: Annotated[int, Meta(ge=0, le=500)] | None = None
    p: Annotated[float, Meta(ge=0, le=1)] | None = None
    # Change nothing here.
    citation_options: JsonObject | None = None  # there are no citations
    priority: int | None = None
    safety_mode: str | None = None
    thinking: JsonObject | None = None
    # Is refused, unless it is false.
    logprobs: bool | None = None


class TextContent(msgspec.Struct, frozen=True):
    """What was said."""

    text: str
    type: Literal["text"] = "text"


class ThinkingContent(msgspec.Struct, frozen=True):
    """What was thought."""

    thinking: str
    type: Literal["thinking"] = "thinking"


class CohereFunction(msgspec.Struct, frozen=True):
    """A function that the model wants called."""

    name: str
    arguments: str


class CohereToolCall(msgspec.Struct, frozen=True):
    """The same with an id."""

    id: str
    function: CohereFunction
    type: Literal["function"] = "function"


class CohereAnswerMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The assistant's. What is said before functions are called is their plan."""

    role: str  # without a default, so that it is always there
    content: list[TextContent | ThinkingContent] = []
    tool_plan: str | None = None
    tool_calls: list[CohereToolCall] | None = None


class Tokens(msgspec.Struct, frozen=True):
    """Of the served model."""

    input_tokens: int
    output_tokens: int


class CohereUsage(msgspec.Struct, frozen=True):
    """The same numbers twice, as Cohere has them."""

    billed_units: Tokens
    tokens: Tokens
    cached_tokens: int


class CohereChatAnswer(msgspec.Struct, frozen=True):
    """Cohere's chat response."""

    id: str
    finish_reason: Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL", "ERROR"]
    message: CohereAnswerMessage
    usage: CohereUsage


class CohereChatCall(msgspec.Struct, frozen=True):
    """A checked request; see `GenerationCall`."""

    model: str | None
    task: Generate
    ignored: tuple[str, ...]

    @property
    def tasks(self) -> Sequence[Generate]:
        """The one text."""
        return (self.task,)

    @property
    def is_streamed(self) -> bool:
        """Whether the client wants events."""
        return self.task.is_streamed

    def answer(self, choices: Sequence[Generated], *, model: str, created_s: int) -> CohereChatAnswer:
        """The whole answer."""
        (generated,) = choices
        tokens = Tokens(generated.usage.input_tokens, generated.usage.output_tokens)
        return CohereChatAnswer(
            id=str(uuid.uuid4()),
            finish_reason=finish_of(generated.finish, generated.stop),
            message=_message(generated),
            usage=CohereUsage(tokens, tokens, generated.usage.cached_tokens),
        )

    def writer(self, *, model: str, created_s: int) -> CohereChatWriter:
        """Of the events."""
        return CohereChatWriter()


_bodies = BodyDecoder(CohereChatBody)


def decode(body: bytes) -> CohereChatCall:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body)
    if fields.logprobs:
        raise UnsupportedParameter("'logprobs' is not served in Cohere's dialect; leave it out", param="logprobs")
    form = fields.response_format
    kind, pattern = form_of(form.type if form else None, (form.schema or form.json_schema) if form else None)
    mode = fields.tool_choice.lower() if fields.tool_choice else None
    offer = chat_tools.offer(_strict(fields), mode if fields.tools else None)
    if fields.tool_choice == "REQUIRED" and not fields.tools:
        raise InvalidRequest("'tool_choice' is 'REQUIRED' without 'tools'", param="tool_choice")
    documents = [_told(document) for document in fields.documents or ()]
    task = Generate(
        messages=written_messages(_messages(fields.messages), documents_text(documents) if documents else ""),
        tools=offer.tools,
        tool_choice=offer.mode,
        form=kind,
        pattern=pattern,
        tokens_max=fields.max_tokens,
        stop=stops_of(fields.stop_sequences),
        sampling=sampling_of(
            temperature=fields.temperature,
            k=fields.k,
            p=fields.p,
            seed=fields.seed,
            frequency_penalty=fields.frequency_penalty,
            presence_penalty=fields.presence_penalty,
        ),
        is_streamed=bool(fields.stream),
    )
    return CohereChatCall(fields.model, task, ignored)


def _strict(body: CohereChatBody) -> list[Tool] | None:
    """The tools, strict if all are to be."""
    if not body.strict_tools or body.tools is None:
        return body.tools
    return [
        msgspec.structs.replace(tool, function=msgspec.structs.replace(tool.function, strict=True))
        if tool.function is not None
        else tool
        for tool in body.tools
    ]


def _told(document: str | Document) -> Any:  # `Any`: a text or an object
    return document if isinstance(document, str) else document.data


def _messages(messages: Sequence[CohereMessage]) -> list[Message]:
    if not messages:
        raise InvalidRequest("'messages' is empty; send at least one message", param="messages")
    call_ids: set[str] = set()
    return [_chat_message(message, f"messages[{index}]", call_ids) for index, message in enumerate(messages)]


def _chat_message(message: CohereMessage, name: str, call_ids: set[str]) -> Message:
    texts = _texts(message.content, f"{name}.content")
    match message.role:
        case "assistant":
            calls = [_call(call, f"{name}.tool_calls[{at}]") for at, call in enumerate(message.tool_calls or ())]
            call_ids.update(call.id for call in calls)
            if message.tool_plan and not texts:
                texts = [message.tool_plan]
            if not texts and not calls:
                raise InvalidRequest(f"missing required field '{name}.content'", param=f"{name}.content")
            return Message("assistant", _joined(texts), tuple(calls))
        case "tool":
            if message.tool_call_id not in call_ids:
                raise InvalidRequest(
                    f"'{name}.tool_call_id' is the id of no call before it", param=f"{name}.tool_call_id"
                )
            return Message("tool", _joined(texts) or "", tool_call_id=message.tool_call_id)
        case role:
            if message.content is None:
                raise InvalidRequest(f"missing required field '{name}.content'", param=f"{name}.content")
            return Message(role, _joined(texts) or "")


def _joined(texts: Sequence[str]) -> str | list[TextPart] | None:
    if len(texts) > 1:
        return [TextPart(text) for text in texts]
    return texts[0] if texts else None


def _call(call: CalledTool, name: str) -> Any:  # `Any`: items.ToolCall
    if call.type != "function" or call.function is None or call.function.name is None or call.id is None:
        raise InvalidRequest(f"'{name}' is no call of a function with an id", param=name)
    return called(call.id, call.function.name, call.function.arguments or "{}")


def _texts(content: str | list[Part] | None, name: str) -> list[str]:
    if content is None or isinstance(content, str):
        return [content] if content else []
    return [text for index, part in enumerate(content) if (text := _text(part, f"{name}[{index}]")) is not None]


def _text(part: Part, name: str) -> str | None:
    """None of a thought: the model does not read what it thought before."""
    match part.type:
        case "thinking":
            return None
        case "document" if part.document is not None:
            data = part.document.data
            return data if isinstance(data, str) else msgspec.json.encode(data).decode()
        case "text" if part.text is not None:
            return part.text
        case "text" | "document":
            raise InvalidRequest(f"missing required field '{name}.{part.type}'", param=f"{name}.{part.type}")
        case other:
            raise UnsupportedParameter(
                f"'{name}' is of type '{other[:50]}'; the model reads text only", param=f"{name}.type"
            )


def _message(generated: Generated) -> CohereAnswerMessage:
    content: list[TextContent | ThinkingContent] = []
    if generated.reasoning:
        content.append(ThinkingContent(generated.reasoning))
    if generated.calls:
        calls = [
            CohereToolCall(f"call_{uuid.uuid4().hex[:24]}", CohereFunction(call.name, call.arguments))
            for call in generated.calls
        ]
        return CohereAnswerMessage("assistant", content, generated.text or None, calls)
    return CohereAnswerMessage("assistant", [*content, TextContent(generated.text)])
