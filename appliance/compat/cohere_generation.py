"""What Cohere's two chat APIs share: sampling, documents, functions and forms, as tasks have them. Pure."""

import json
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from appliance.compat.items import CalledFunction, Message, TextPart, ToolCall
from appliance.compat.json_bounds import JsonObject
from appliance.compat.responses_settings import check_schema
from appliance.compat.sampling import checked_stop, seed_of
from appliance.errors import InvalidRequest
from appliance.jobs import Done, Finish, Sampling, Usage

STOPS_MAX = 5
TEMPERATURE = 0.3  # Cohere's own defaults
P = 0.75
DOCUMENTS_MAX = 1000

FinishReason = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL", "ERROR"]

_encoder = msgspec.json.Encoder()


def sampling_of(
    *,
    temperature: float | None,
    k: int | None,
    p: float | None,
    seed: int | None,
    frequency_penalty: float | None,
    presence_penalty: float | None,
) -> Sampling:
    """In Cohere's words and with its defaults."""
    return Sampling(
        temperature=TEMPERATURE if temperature is None else temperature,
        top_p=P if p is None else p or 1.0,
        top_k=k or 0,
        frequency_penalty=frequency_penalty or 0.0,
        presence_penalty=presence_penalty or 0.0,
        seed=None if seed is None else seed_of(seed),
    )


def stops_of(stops: list[str] | None) -> tuple[str, ...]:
    """Raises InvalidRequest for too many, or empty ones."""
    return checked_stop(stops, field="stop_sequences", count_max=STOPS_MAX)


def form_of(
    kind: Literal["text", "json_object"] | None, schema: JsonObject | None
) -> tuple[Literal["text", "json_object", "json_schema"], bytes]:
    """The form of an answer, as `jobs.Generate` has it. Raises InvalidRequest for a schema that is out of bounds."""
    if kind != "json_object":
        if schema is not None:
            raise InvalidRequest("a schema needs the type 'json_object'", param="response_format.type")
        return "text", b""
    if schema is None:
        return "json_object", b""
    check_schema(schema, "response_format.schema")
    return "json_schema", _encoder.encode(schema)


def documents_text(documents: Sequence[Any]) -> str:  # `Any`: a text, or an object of any fields
    """Documents as the model reads them, one after another, for the system's message. No citations come of them."""
    if len(documents) > DOCUMENTS_MAX:
        raise InvalidRequest(
            f"'documents' has {len(documents)} documents, the limit is {DOCUMENTS_MAX}", param="documents"
        )
    listed = "\n\n".join(
        f"Document {number}:\n{document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)}"
        for number, document in enumerate(documents)
    )
    return f"Answer with the help of these documents where they help.\n\n{listed}"


def called(call_id: str, name: str, arguments: str) -> ToolCall:
    """A call, as chats have it."""
    return ToolCall(call_id, CalledFunction(name, arguments))


def written_messages(messages: Sequence[Message], preamble: str) -> bytes:
    """As tasks have them, with a preamble in front of what the system says."""
    if preamble:
        first = messages[0] if messages else None
        if first is not None and first.role == "system":
            said = first.content if isinstance(first.content, str) else "\n".join(_texts(first.content))
            messages = [Message("system", f"{said}\n\n{preamble}"), *messages[1:]]
        else:
            messages = [Message("system", preamble), *messages]
    return _encoder.encode(messages)


def finish_of(finish: Finish, stop: str) -> FinishReason:
    """Why a text ended."""
    match finish:
        case "length":
            return "MAX_TOKENS"
        case "tool_calls":
            return "TOOL_CALL"
        case "stop":
            return "STOP_SEQUENCE" if stop else "COMPLETE"


def ended(done: Done) -> FinishReason:
    """The same of a stream."""
    return finish_of(done.finish, done.stop)


def tokens_of(usage: Usage) -> dict[str, int]:
    """Input and output."""
    return {"input_tokens": usage.input_tokens, "output_tokens": usage.output_tokens}


def as_ascii(event: object) -> bytes:
    """JSON without a byte over 127: cohere-python decodes each piece of a response that it receives apart."""
    return json.dumps(event, separators=(",", ":")).encode()


def _texts(parts: Sequence[TextPart] | None) -> list[str]:
    return [part.text for part in parts or ()]
