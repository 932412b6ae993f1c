"""`POST /v2/chat` in Cohere's dialect: body → `CohereChatCall` → one `Generate`, and its text → answer or stream."""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from appliance.compat import chat_tools, cohere_chat_messages
from appliance.compat.bodies import BodyDecoder
from appliance.compat.chat_tools import Function, Offer
from appliance.compat.cohere_chat_answer import CohereChatAnswer, CohereUsage, logprob_items, message_of, new_id
from appliance.compat.cohere_chat_messages import Message
from appliance.compat.cohere_chat_stream import CohereChatWriter
from appliance.compat.cohere_documents import Document, check_count, data_of, with_documents
from appliance.compat.cohere_generation import CohereSettings, finish_of, task_of
from appliance.compat.generation import Generated
from appliance.compat.json_bounds import JsonObject
from appliance.errors import UnsupportedParameter
from appliance.jobs import Generate

NAMES = ((r"response_format\.json_schema\.schema", "response_format.json_schema"),)  # see `generation.Names`


class Tool(msgspec.Struct, frozen=True):
    """A function that may be called."""

    function: Function | None = None
    type: str = "function"


class Thinking(msgspec.Struct, frozen=True):
    """Whether thoughts are shown: a model that thinks does so either way."""

    type: Literal["enabled", "disabled"]
    token_budget: int | None = None


class CitationOptions(msgspec.Struct, frozen=True):
    """How an answer is to cite."""

    mode: str | None = None


class CohereChatBody(CohereSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that Cohere documents. Explicit nulls mean absent."""

    model: str
    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: Literal["REQUIRED", "NONE"] | None = None
    strict_tools: bool | None = None
    documents: list[str | Document] | None = None
    logprobs: bool | None = None
    thinking: Thinking | None = None
    # Change nothing here: nothing is cited (which is said where it is asked for), and all requests have one priority.
    citation_options: CitationOptions | None = None
    priority: Annotated[int, Meta(ge=0, le=999)] | None = None


class CohereChatCall(msgspec.Struct, frozen=True):
    """A checked request; see `GenerationCall`."""

    body: CohereChatBody
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

    @property
    def is_plan(self) -> bool:
        """Whether a call was asked for."""
        return self.task.tool_choice == "required"

    @property
    def has_thoughts(self) -> bool:
        """Whether the client wants to see them."""
        return self.body.thinking is None or self.body.thinking.type == "enabled"

    def answer(self, choices: Sequence[Generated], *, model: str, created_s: int) -> CohereChatAnswer:
        """The whole answer."""
        (generated,) = choices
        return CohereChatAnswer(
            new_id(),
            finish_of(generated.finish, generated.stop),
            message_of(generated, is_plan=self.is_plan, has_thoughts=self.has_thoughts),
            CohereUsage.of(generated.usage),
            logprob_items(generated.logprobs) if self.body.logprobs else msgspec.UNSET,
        )

    def writer(self, *, model: str, created_s: int) -> CohereChatWriter:
        """Of the events."""
        return CohereChatWriter(is_plan=self.is_plan, has_thoughts=self.has_thoughts)


_bodies = BodyDecoder(CohereChatBody)


def decode(body: bytes) -> CohereChatCall:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body)
    if fields.thinking is not None and fields.thinking.token_budget is not None:
        raise UnsupportedParameter(
            "'thinking.token_budget' is not served; bound the whole answer with 'max_tokens'",
            param="thinking.token_budget",
        )
    messages = with_documents(cohere_chat_messages.translated(fields.messages), _documents(fields.documents or ()))
    offer = _offer(fields)
    task = task_of(
        fields,
        messages=cohere_chat_messages.encoded(messages),
        tools=offer.tools,
        tool_choice=offer.mode,
        top_logprobs=0 if fields.logprobs else None,
    )
    if fields.citation_options is not None and fields.citation_options.mode not in ("OFF", "off", "NONE"):
        ignored += ("citation_options",)
    return CohereChatCall(fields, task, ignored)


def _offer(body: CohereChatBody) -> Offer:
    """`strict_tools` is said of each, as OpenAI does."""
    tools = [chat_tools.Tool(tool.type, tool.function) for tool in body.tools or ()]
    if body.strict_tools:
        tools = [
            tool
            if tool.function is None
            else msgspec.structs.replace(tool, function=msgspec.structs.replace(tool.function, strict=True))
            for tool in tools
        ]
    return chat_tools.offer(tools, None if body.tool_choice is None else body.tool_choice.lower())


def _documents(documents: Sequence[str | Document]) -> list[JsonObject | str]:
    check_count(documents)
    return [
        each if isinstance(each, str) else data_of(each, f"documents[{index}]") for index, each in enumerate(documents)
    ]
