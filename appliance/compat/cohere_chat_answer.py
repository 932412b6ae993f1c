"""What `POST /v2/chat` answers with."""

import uuid
from collections.abc import Sequence
from typing import Literal

import msgspec

from appliance.compat.cohere_generation import FinishReason, Tokens
from appliance.compat.generation import Generated
from appliance.jobs import Chosen, Usage


class TextContent(msgspec.Struct, frozen=True, tag="text"):
    """What was said."""

    text: str


class ThinkingContent(msgspec.Struct, frozen=True, tag="thinking"):
    """What was thought before it."""

    thinking: str


class CohereFunction(msgspec.Struct, frozen=True):
    """A function, and its arguments as JSON."""

    name: str
    arguments: str


class CohereToolCall(msgspec.Struct, frozen=True):
    """What the model wants called; the result is sent by its id."""

    id: str
    function: CohereFunction
    type: Literal["function"] = "function"


class CohereAnswerMessage(msgspec.Struct, frozen=True):
    """The assistant's. What it says before calls is its plan."""

    role: Literal["assistant"] = "assistant"
    content: list[TextContent | ThinkingContent] | msgspec.UnsetType = msgspec.UNSET
    tool_plan: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[CohereToolCall] | msgspec.UnsetType = msgspec.UNSET


class CohereUsage(msgspec.Struct, frozen=True):
    """Nothing is billed here: both are the model's own count."""

    billed_units: Tokens
    tokens: Tokens
    cached_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "CohereUsage":
        """In Cohere's words."""
        counts = Tokens.of(usage)
        return cls(counts, counts, usage.cached_tokens)


class CohereLogprobs(msgspec.Struct, frozen=True):
    """A piece of text, and the tokens that it is made of: a character may take several."""

    text: str
    token_ids: list[int]
    logprobs: list[float]


class CohereChatAnswer(msgspec.Struct, frozen=True):
    """Cohere's v2 chat response."""

    id: str
    finish_reason: FinishReason
    message: CohereAnswerMessage
    usage: CohereUsage
    logprobs: list[CohereLogprobs] | msgspec.UnsetType = msgspec.UNSET


def message_of(generated: Generated, *, is_plan: bool, has_thoughts: bool) -> CohereAnswerMessage:
    """`is_plan`: a call was asked for, so that text can only be the plan of it."""
    is_plan = is_plan or bool(generated.calls)
    content: list[TextContent | ThinkingContent] = []
    if generated.reasoning and has_thoughts:
        content.append(ThinkingContent(generated.reasoning))
    if not is_plan:
        content.append(TextContent(generated.text))
    calls = [CohereToolCall(new_call_id(), CohereFunction(each.name, each.arguments)) for each in generated.calls]
    return CohereAnswerMessage(
        content=content or msgspec.UNSET,
        tool_plan=generated.text if is_plan and generated.text else msgspec.UNSET,
        tool_calls=calls or msgspec.UNSET,
    )


def logprob_items(chosen: Sequence[Chosen]) -> list[CohereLogprobs]:
    """One a token, or a few where only their bytes together are text."""
    items: list[CohereLogprobs] = []
    pending: list[Chosen] = []
    for token in chosen:
        pending.append(token)
        if _is_text(b"".join(each.data for each in pending)):
            items.append(logprob_item(pending))
            pending = []
    return [*items, logprob_item(pending)] if pending else items


def logprob_item(chosen: Sequence[Chosen]) -> CohereLogprobs:
    """All of them as one piece."""
    return CohereLogprobs(
        b"".join(token.data for token in chosen).decode(errors="replace"),
        [token.id for token in chosen],
        [token.logprob for token in chosen],
    )


def new_id() -> str:
    """An id that nobody has had."""
    return str(uuid.uuid4())


def new_call_id() -> str:
    """The same, of a call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
