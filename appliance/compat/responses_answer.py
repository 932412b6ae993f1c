"""The answer of `/v1/responses`: the response and the items of its output.

Every field is written, whatever its value: openai-python's types and the AI SDK's schemas want most of them.
"""

import uuid
from collections.abc import Sequence
from typing import Literal

import msgspec

from appliance.compat.generation import Call, Generated
from appliance.compat.json_bounds import JsonObject
from appliance.compat.response_usage import ResponseUsage
from appliance.jobs import Candidate, Chosen, Finish

ItemStatus = Literal["in_progress", "completed", "incomplete"]
ResponseStatus = Literal["in_progress", "completed", "incomplete", "failed"]


class TopLogprob(msgspec.Struct, frozen=True):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token of the text. `token` shows a part of a character as U+FFFD; `bytes` are exact."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class OutputText(msgspec.Struct, frozen=True, kw_only=True):
    """What a message says."""

    type: Literal["output_text"] = "output_text"
    text: str
    annotations: tuple[()] = ()
    logprobs: list[TokenLogprob]


class ReasoningText(msgspec.Struct, frozen=True, kw_only=True):
    """What was thought."""

    type: Literal["reasoning_text"] = "reasoning_text"
    text: str


class MessageItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    """A message to the user."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class CallItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A function that the model wants called."""

    id: str
    status: ItemStatus
    arguments: str  # JSON
    call_id: str
    name: str


class ReasoningItem(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """What the model thought, word by word; it is not summarized."""

    id: str
    status: ItemStatus
    summary: tuple[()] = ()
    content: list[ReasoningText]


OutputItem = MessageItem | CallItem | ReasoningItem


class ResponseError(msgspec.Struct, frozen=True):
    """Why a response failed. The SDKs know few codes."""

    code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"]
    message: str


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Why a response is incomplete."""

    reason: Literal["max_output_tokens"]


class FunctionTool(msgspec.Struct, frozen=True, kw_only=True):
    """A tool, as the client sent it."""

    type: Literal["function"] = "function"
    name: str
    description: str | None
    parameters: JsonObject | None  # a JSON schema
    strict: bool | None


class FunctionChoice(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """The one function that must be called."""

    name: str


class AllowedTools(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="allowed_tools"):
    """The functions that may be called."""

    mode: Literal["auto", "required"]
    tools: list[FunctionChoice]


ToolChoice = Literal["none", "auto", "required"] | FunctionChoice | AllowedTools


class PlainFormat(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """Any text."""


class JsonFormat(msgspec.Struct, frozen=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class SchemaFormat(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON of a schema."""

    name: str
    description: str | None
    schema: JsonObject
    strict: bool | None


class TextSettings(msgspec.Struct, frozen=True):
    """What the text is to be like."""

    format: PlainFormat | JsonFormat | SchemaFormat
    verbosity: Literal["low", "medium", "high"]


class ReasoningSettings(msgspec.Struct, frozen=True):
    """What the client asked about reasoning."""

    effort: str | None
    summary: str | None


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The whole answer; within a stream also what is known of it so far."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # unix seconds
    status: ResponseStatus = "in_progress"
    background: Literal[False] = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: ReasoningSettings
    safety_identifier: str | None
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False  # nothing is stored here, whatever was asked
    temperature: float
    text: TextSettings
    tool_choice: ToolChoice
    tools: list[FunctionTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    user: str | None
    metadata: dict[str, str]


def new_id(prefix: str) -> str:
    """An id of OpenAI's form."""
    return f"{prefix}_{uuid.uuid4().hex}"


def logprobs(chosen: Sequence[Chosen]) -> list[TokenLogprob]:
    """In OpenAI's words."""
    return [
        TokenLogprob(_shown(token.data), token.logprob, list(token.data), [_top(other) for other in token.top])
        for token in chosen
    ]


def items(generated: Generated) -> list[OutputItem]:
    """The output of a complete text: what was thought, said and called; in that order, which a stream shows truly."""
    last: ItemStatus = "incomplete" if generated.finish == "length" else "completed"
    found: list[OutputItem] = []
    if generated.reasoning:
        has_more = bool(generated.text or generated.calls)
        found.append(reasoning_item(new_id("rs"), generated.reasoning, "completed" if has_more else last))
    if generated.text or lacks_message(
        has_thought=bool(found), has_others=bool(generated.calls), finish=generated.finish
    ):
        status = "completed" if generated.calls else last
        found.append(message_item(new_id("msg"), generated.text, logprobs(generated.logprobs), status))
    for index, call in enumerate(generated.calls):
        is_last = index == len(generated.calls) - 1
        found.append(call_item(new_id("fc"), new_id("call"), call, last if is_last else "completed"))
    return found


def lacks_message(*, has_thought: bool, has_others: bool, finish: Finish) -> bool:
    """Whether an output needs an empty message: clients look for one unless the model called, or was cut in thought."""
    return not has_others and not (has_thought and finish == "length")


def reasoning_item(item_id: str, text: str, status: ItemStatus) -> ReasoningItem:
    """What was thought."""
    return ReasoningItem(id=item_id, status=status, content=[ReasoningText(text=text)] if text else [])


def message_item(item_id: str, text: str, tokens: list[TokenLogprob], status: ItemStatus) -> MessageItem:
    """What was said."""
    return MessageItem(id=item_id, status=status, content=[OutputText(text=text, logprobs=tokens)])


def call_item(item_id: str, call_id: str, call: Call, status: ItemStatus) -> CallItem:
    """What was called."""
    return CallItem(id=item_id, status=status, arguments=call.arguments, call_id=call_id, name=call.name)


def _top(other: Candidate) -> TopLogprob:
    return TopLogprob(_shown(other.data), other.logprob, list(other.data))


def _shown(data: bytes) -> str:
    return data.decode("utf-8", "replace")
