"""`POST /v1/chat`, Cohere's older API: one message and its history; a stream is a line of JSON an event."""

import json
import re
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.compat import chat_tools
from appliance.compat.bodies import BodyDecoder
from appliance.compat.chat_tools import Function, Tool
from appliance.compat.cohere_chat import CohereFormat, Penalty
from appliance.compat.cohere_generation import (
    as_ascii,
    called,
    documents_text,
    ended,
    finish_of,
    form_of,
    sampling_of,
    stops_of,
    tokens_of,
    written_messages,
)
from appliance.compat.generation import Gathering, Generated
from appliance.compat.items import Message
from appliance.compat.json_bounds import JsonObject
from appliance.errors import ApplianceError, InvalidRequest, UnsupportedParameter
from appliance.jobs import Delta, Done, Generate

# Python's names of types, as tools' parameters have them, in JSON schema's words.
_TYPES: dict[str, dict[str, Any]] = {
    "str": {"type": "string"},
    "string": {"type": "string"},
    "int": {"type": "integer"},
    "integer": {"type": "integer"},
    "float": {"type": "number"},
    "number": {"type": "number"},
    "bool": {"type": "boolean"},
    "boolean": {"type": "boolean"},
    "list": {"type": "array"},
    "array": {"type": "array"},
    "dict": {"type": "object"},
    "object": {"type": "object"},
}
_LIST = re.compile(r"(?:list|array)\[(.*)\]")
_ROLES = {"USER": "user", "CHATBOT": "assistant", "SYSTEM": "system"}


class ParameterDefinition(msgspec.Struct, frozen=True):
    """One parameter of a function."""

    type: str
    description: str | None = None
    required: bool | None = None


class V1Tool(msgspec.Struct, frozen=True):
    """A function."""

    name: str
    description: str | None = None
    parameter_definitions: dict[str, ParameterDefinition] | None = None


class V1Call(msgspec.Struct, frozen=True):
    """What was called."""

    name: str
    parameters: JsonObject = {}


class ToolResult(msgspec.Struct, frozen=True):
    """What a call gave."""

    call: V1Call
    outputs: list[JsonObject]


class V1Message(msgspec.Struct, frozen=True):
    """A message of the history."""

    role: Literal["USER", "CHATBOT", "SYSTEM", "TOOL"]
    message: str | None = None
    tool_calls: list[V1Call] | None = None
    tool_results: list[ToolResult] | None = None


class CohereChatV1Body(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields Cohere documents. Explicit nulls mean absent."""

    message: str
    model: str | None = None
    stream: bool | None = None
    preamble: str | None = None
    chat_history: list[V1Message] | None = None
    documents: list[JsonObject] | None = None
    tools: list[V1Tool] | None = None
    tool_results: list[ToolResult] | None = None
    response_format: CohereFormat | None = None
    max_tokens: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    k: Annotated[int, Meta(ge=0, le=500)] | None = None
    p: Annotated[float, Meta(ge=0, le=1)] | None = None
    # Change nothing here.
    citation_quality: str | None = None
    force_single_step: bool | None = None
    max_input_tokens: int | None = None
    safety_mode: str | None = None
    # Are refused, unless they ask for what happens anyway.
    connectors: list[JsonObject] | None = None
    conversation_id: str | None = None
    prompt_truncation: str | None = None
    raw_prompting: bool | None = None
    search_queries_only: bool | None = None


class HistoryMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """A message of the history, as the answer gives it back."""

    role: str
    message: str = ""
    tool_calls: list[V1Call] | None = None


class CohereChatV1Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """Cohere's older chat response."""

    text: str
    generation_id: str
    response_id: str
    finish_reason: str
    chat_history: list[HistoryMessage]
    meta: JsonObject
    tool_calls: list[V1Call] | None = None


class CohereChatV1Call(msgspec.Struct, frozen=True):
    """A checked request; see `GenerationCall`."""

    body: CohereChatV1Body
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

    def answer(self, choices: Sequence[Generated], *, model: str, created_s: int) -> CohereChatV1Answer:
        """The whole answer."""
        (generated,) = choices
        return self.answer_of(generated)

    def answer_of(self, generated: Generated) -> CohereChatV1Answer:
        """The same of the one text."""
        calls = [V1Call(call.name, _parameters(call.arguments)) for call in generated.calls] or None
        history = [
            HistoryMessage(message.role, message.message or "", message.tool_calls)
            for message in self.body.chat_history or ()
        ]
        if self.body.message:
            history.append(HistoryMessage("USER", self.body.message))
        history.append(HistoryMessage("CHATBOT", generated.text, calls))
        tokens = tokens_of(generated.usage)
        finish = finish_of(generated.finish, generated.stop)
        return CohereChatV1Answer(
            text=generated.text,
            generation_id=str(uuid.uuid4()),
            response_id=str(uuid.uuid4()),
            finish_reason="COMPLETE" if finish == "TOOL_CALL" else finish,
            chat_history=history,
            meta={"api_version": {"version": "1"}, "billed_units": tokens, "tokens": tokens},
            tool_calls=calls,
        )

    def writer(self, *, model: str, created_s: int) -> "CohereChatV1Writer":
        """Of the events."""
        return CohereChatV1Writer(self)


_bodies = BodyDecoder(CohereChatV1Body)


def decode(body: bytes) -> CohereChatV1Call:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body)
    _check_served(fields)
    if not fields.message and not fields.tool_results:
        raise InvalidRequest("'message' is empty; send some text", param="message")
    form = fields.response_format
    kind, pattern = form_of(form.type if form else None, (form.schema or form.json_schema) if form else None)
    offer = chat_tools.offer([_tool(tool) for tool in fields.tools or ()], None)
    task = Generate(
        messages=written_messages(_messages(fields), documents_text(fields.documents) if fields.documents else ""),
        tools=offer.tools,
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
    return CohereChatV1Call(fields, task, ignored)


def _check_served(body: CohereChatV1Body) -> None:
    """Raises UnsupportedParameter for a field that would change the answer."""
    refused = {
        "connectors": "nothing is searched here: send `documents`" if body.connectors else None,
        "conversation_id": "nothing is stored here: send `chat_history`" if body.conversation_id else None,
        "prompt_truncation": "nothing is left out of a prompt here; send 'OFF'"
        if body.prompt_truncation not in (None, "OFF")
        else None,
        "raw_prompting": "ask /v1/completions for that" if body.raw_prompting else None,
        "search_queries_only": "nothing is searched here" if body.search_queries_only else None,
    }
    for name, reason in refused.items():
        if reason is not None:
            raise UnsupportedParameter(f"'{name}' is not served: {reason}", param=name)


def _tool(tool: V1Tool) -> Tool:
    definitions = tool.parameter_definitions or {}
    schema: JsonObject = {
        "type": "object",
        "properties": {name: _property(definition) for name, definition in definitions.items()},
        "required": [name for name, definition in definitions.items() if definition.required],
        "additionalProperties": False,
    }
    return Tool("function", Function(tool.name, tool.description, schema))


def _property(definition: ParameterDefinition) -> JsonObject:
    described = {"description": definition.description} if definition.description else {}
    return {**_schema(definition.type.strip().lower()), **described}


def _schema(kind: str) -> JsonObject:
    """Any value of a type that is not known."""
    if found := _LIST.fullmatch(kind):
        return {"type": "array", "items": _schema(found[1].strip())}
    return _TYPES.get(kind.partition("[")[0], {})


def _messages(body: CohereChatV1Body) -> list[Message]:
    found = [Message("system", body.preamble)] if body.preamble else []
    for index, message in enumerate(body.chat_history or ()):
        if message.role == "TOOL":
            found += _results(found, message.tool_results or (), f"chat_history[{index}]")
        elif message.message is None and not message.tool_calls:
            raise InvalidRequest(
                f"missing required field 'chat_history[{index}].message'", param=f"chat_history[{index}].message"
            )
        else:
            calls = [
                called(f"call_{index}_{number}", call.name, json.dumps(call.parameters))
                for number, call in enumerate(message.tool_calls or ())
            ]
            found.append(Message(_ROLES[message.role], message.message or None, tuple(calls)))
    if body.message:
        found.append(Message("user", body.message))
    return found + _results(found, body.tool_results or (), "tool_results")


def _results(before: Sequence[Message], results: Sequence[ToolResult], name: str) -> list[Message]:
    """Results of the calls of the assistant's last message, or of calls that are written down with them."""
    last = before[-1] if before else None
    known = list(last.tool_calls) if last is not None and last.role == "assistant" else []
    missing = [
        called(f"call_{name}_{number}", result.call.name, json.dumps(result.call.parameters))
        for number, result in enumerate(results)
    ]
    calls = known if len(known) >= len(results) else missing
    messages = [] if calls is known else [Message("assistant", None, tuple(missing))]
    return messages + [
        Message("tool", json.dumps(result.outputs, ensure_ascii=False), tool_call_id=call.id)
        for call, result in zip(calls, results, strict=False)
    ]


def _parameters(arguments: str) -> JsonObject:
    """What was cut short has no parameters."""
    try:
        found = json.loads(arguments or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


class CohereChatV1Writer:
    """Writes the events of one request."""

    content_type = b"application/stream+json"
    takes_pings = False

    def __init__(self, call: CohereChatV1Call) -> None:
        self._call = call
        self._gathering = Gathering()

    def start(self) -> bytes:
        """The answer begins."""
        return _line("stream-start", generation_id=str(uuid.uuid4()))

    def delta(self, choice: int, delta: Delta) -> bytes:
        """The next part."""
        self._gathering.add(delta)
        lines = [_line("text-generation", text=delta.text)] if delta.text else []
        for part in delta.calls:
            chunk: dict[str, object] = {"index": part.index}
            if part.name:
                chunk["name"] = part.name
            if part.arguments:
                chunk["parameters"] = part.arguments
            lines.append(_line("tool-calls-chunk", tool_call_delta=chunk))
        return b"".join(lines)

    def finish(self, choice: int, done: Done) -> bytes:
        """The answer is complete, and comes again as a whole."""
        generated = self._gathering.whole(done)
        answer = self._call.answer_of(generated)
        calls = b""
        if answer.tool_calls:
            calls = _line("tool-calls-generation", text=answer.text, tool_calls=msgspec.to_builtins(answer.tool_calls))
        finish = ended(done)
        reason = "COMPLETE" if finish == "TOOL_CALL" else finish
        return calls + _end(reason, msgspec.to_builtins(answer))

    def end(self) -> bytes:
        """Nothing more."""
        return b""

    def error(self, error: ApplianceError) -> bytes:
        """The stream ends here."""
        return _end("ERROR", {"text": "", "finish_reason": "ERROR", "error": error.message})


def _end(reason: str, response: object) -> bytes:
    return _line("stream-end", finish_reason=reason, response=response)


def _line(kind: str, **fields: object) -> bytes:
    return as_ascii({"event_type": kind, "is_finished": kind == "stream-end", **fields}) + b"\n"
