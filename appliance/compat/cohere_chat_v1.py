"""`POST /v1/chat`, Cohere's older API: body → `CohereChatV1Call` → one `Generate`, and its text → answer or stream.

Nothing is stored, searched or left out here: what asks for that is refused.
"""

from collections.abc import Sequence

import msgspec

from appliance.compat import chat_tools, cohere_chat_v1_messages, cohere_chat_v1_tools
from appliance.compat.bodies import BodyDecoder
from appliance.compat.chat_messages import Message
from appliance.compat.cohere_chat_messages import encoded
from appliance.compat.cohere_chat_v1_answer import CohereChatV1Answer, CohereChatV1Writer, answer_of, new_id
from appliance.compat.cohere_chat_v1_messages import V1Message, V1Result, check_history, continued
from appliance.compat.cohere_chat_v1_tools import V1Tool
from appliance.compat.cohere_documents import check_count, check_data, with_documents
from appliance.compat.cohere_generation import CohereSettings, task_of
from appliance.compat.generation import Generated
from appliance.compat.json_bounds import JsonObject
from appliance.errors import InvalidRequest, UnsupportedParameter
from appliance.jobs import Generate

NAMES = (  # see `generation.Names`
    (r"messages.*", "message"),
    (r"(tools\[\d+\])\.function\.parameters", r"\1.parameter_definitions"),
    (r"response_format\.json_schema\.schema", "response_format.schema"),
)
EXCLUDES = "_excludes"  # of a document: names of fields that the model is not shown


class CohereChatV1Body(CohereSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that Cohere documents. Explicit nulls mean absent."""

    message: str
    model: str | None = None
    preamble: str | None = None
    chat_history: list[V1Message] | None = None
    documents: list[JsonObject] | None = None
    tools: list[V1Tool] | None = None
    tool_results: list[V1Result] | None = None
    force_single_step: bool | None = None
    # Changes nothing here: nothing is cited, which is said where it is asked for.
    citation_quality: str | None = None
    # Are refused, unless they ask for what happens anyway.
    connectors: list[JsonObject] | None = None
    conversation_id: str | None = None
    max_input_tokens: int | None = None
    prompt_truncation: str | None = None
    raw_prompting: bool | None = None
    search_queries_only: bool | None = None


class CohereChatV1Call(msgspec.Struct, frozen=True):
    """A checked request; see `GenerationCall`. `history` ends with the turn that is to be answered."""

    model: str | None
    history: list[V1Message]
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

    def answer(self, choices: Sequence[Generated], *, model: str, created_s: int) -> CohereChatV1Answer:
        """The whole answer."""
        (generated,) = choices
        return answer_of(generated, self.history, generation_id=new_id())

    def writer(self, *, model: str, created_s: int) -> CohereChatV1Writer:
        """Of the events."""
        return CohereChatV1Writer(self.history)


_bodies = BodyDecoder(CohereChatV1Body)


def decode(body: bytes) -> CohereChatV1Call:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body)
    _check_served(fields)
    check_history(fields.chat_history or ())
    history = continued(fields.chat_history or (), fields.message, fields.tool_results or ())
    messages = cohere_chat_v1_messages.translated(history)
    if fields.preamble:
        messages = [Message("system", fields.preamble), *messages]
    # A single step is over when its results are there: what follows is the answer.
    is_over = bool(fields.force_single_step and fields.tool_results)
    offer = chat_tools.offer(cohere_chat_v1_tools.translated(fields.tools or ()), "none" if is_over else None)
    task = task_of(
        fields,
        messages=encoded(with_documents(messages, _documents(fields.documents or ()))),
        tools=offer.tools,
        tool_choice=offer.mode,
    )
    if fields.citation_quality not in (None, "off", "OFF"):
        ignored += ("citation_quality",)
    return CohereChatV1Call(fields.model, history, task, ignored)


def _check_served(body: CohereChatV1Body) -> None:
    """Raises UnsupportedParameter for a field that would change the answer."""
    is_cut = body.prompt_truncation not in (None, "OFF")
    refused = {
        "connectors": "nothing is searched here: send 'documents'" if body.connectors else None,
        "conversation_id": "nothing is stored here: send 'chat_history'" if body.conversation_id is not None else None,
        "max_input_tokens": "nothing is left out of a prompt here" if body.max_input_tokens is not None else None,
        "prompt_truncation": "nothing is left out of a prompt here; send 'OFF'" if is_cut else None,
        "raw_prompting": "send the prompt to /v1/completions" if body.raw_prompting else None,
        "search_queries_only": "nothing is searched here" if body.search_queries_only else None,
    }
    for name, why in refused.items():
        if why is not None:
            raise UnsupportedParameter(f"'{name}' is not served: {why}", param=name)


def _documents(documents: Sequence[JsonObject]) -> list[JsonObject]:
    """Without what the model is not shown: ids, which are for citations, and what a document itself excludes."""
    check_count(documents)
    shown: list[JsonObject] = []
    for index, document in enumerate(documents):
        name = f"documents[{index}]"
        check_data(document, name)
        excluded = document.get(EXCLUDES, [])
        if not isinstance(excluded, list):
            raise InvalidRequest(f"'{name}.{EXCLUDES}' is no list of names", param=f"{name}.{EXCLUDES}")
        hidden = {"id", EXCLUDES, *(key for key in excluded if isinstance(key, str))}
        shown.append({key: value for key, value in document.items() if key not in hidden})
    return shown
