"""What `/v1/chat/completions` answers with: OpenAI's chat completion."""

import uuid
from typing import Literal

import msgspec

from appliance.compat.generation import Generated
from appliance.jobs import Chosen, Finish, Usage

FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class ChatLogprob(msgspec.Struct, frozen=True):
    """A token and its log-probability. `token` is what its bytes spell, or stands in for a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatChosen(msgspec.Struct, frozen=True):
    """A token of the answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[ChatLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Those of a choice, or of a part of it."""

    content: list[ChatChosen]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """A function that the model wants called, its arguments as JSON."""

    name: str
    arguments: str


class ChatToolCall(msgspec.Struct, frozen=True):
    """The same with an id, by which its result is sent."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ChatMessage(msgspec.Struct, frozen=True):
    """The assistant's."""

    role: Literal["assistant"]
    content: str | None
    refusal: None = None
    tool_calls: list[ChatToolCall] | msgspec.UnsetType = msgspec.UNSET
    function_call: FunctionCall | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One text."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class PromptDetails(msgspec.Struct, frozen=True):
    """Of a prompt's tokens."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True):
    """Of an answer's tokens."""

    reasoning_tokens: int


class ChatUsage(msgspec.Struct, frozen=True):
    """Tokens of the served model."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails

    @classmethod
    def of(cls, usage: Usage) -> "ChatUsage":
        """In OpenAI's words."""
        return cls(
            usage.input_tokens,
            usage.output_tokens,
            usage.input_tokens + usage.output_tokens,
            PromptDetails(usage.cached_tokens),
            CompletionDetails(usage.reasoning_tokens),
        )


class ChatAnswer(msgspec.Struct, frozen=True):
    """OpenAI's chat completion."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: ChatUsage
    system_fingerprint: None = None


def choice_of(index: int, choice: Generated, *, is_legacy: bool, has_logprobs: bool) -> ChatChoice:
    """A choice in OpenAI's words. `is_legacy`: with functions as they were before tools."""
    calls = [FunctionCall(each.name, each.arguments) for each in choice.calls]
    has_legacy = is_legacy and bool(calls)
    message = ChatMessage(
        role="assistant",
        content=choice.text or (None if calls else ""),
        tool_calls=[ChatToolCall(new_id("call_"), each) for each in calls]
        if calls and not has_legacy
        else msgspec.UNSET,
        function_call=calls[0] if has_legacy else msgspec.UNSET,
        reasoning_content=choice.reasoning or msgspec.UNSET,
    )
    logprobs = ChatLogprobs([chosen_of(each) for each in choice.logprobs]) if has_logprobs else None
    return ChatChoice(index, message, logprobs, finish_reason(choice.finish, is_legacy=is_legacy))


def finish_reason(finish: Finish, *, is_legacy: bool) -> FinishReason:
    """Why a text ended."""
    return "function_call" if is_legacy and finish == "tool_calls" else finish


def chosen_of(chosen: Chosen) -> ChatChosen:
    """A token of a text, as clients read it."""
    top = [ChatLogprob(spelled(each.data), each.logprob, list(each.data)) for each in chosen.top]
    return ChatChosen(spelled(chosen.data), chosen.logprob, list(chosen.data), top)


def spelled(data: bytes) -> str:
    """A token's text; what is a part of a character is told as such."""
    return data.decode(errors="replace")


def new_id(prefix: str) -> str:
    """An id that nobody has had."""
    return prefix + uuid.uuid4().hex[:24]
