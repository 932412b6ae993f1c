"""What Cohere's two chat APIs share: how to sample, where to stop, in what form, and why a text ended. Pure."""

import json
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

from appliance.compat.json_bounds import JsonObject
from appliance.compat.responses_settings import check_schema
from appliance.compat.sampling import checked_stop, seed_of
from appliance.errors import InvalidRequest, UnsupportedParameter
from appliance.jobs import Finish, Generate, Sampling, Usage

STOPS_MAX: Final = 5
# What Cohere samples with when it is not told.
TEMPERATURE: Final = 0.3
P: Final = 0.75

FinishReason = Literal["COMPLETE", "STOP_SEQUENCE", "MAX_TOKENS", "TOOL_CALL", "ERROR"]
SafetyMode = Literal["CONTEXTUAL", "STRICT", "NONE", "OFF"]
Penalty = Annotated[float, Meta(ge=0, le=1)]
Natural = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class CohereFormat(msgspec.Struct, frozen=True):
    """The form of an answer. v1 says `schema`, v2 `json_schema`; either is read."""

    type: Literal["text", "json_object"]
    schema: JsonObject | None = None
    json_schema: JsonObject | None = None


class CohereSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Fields of both bodies, in Cohere's ranges. A `p` of 0 is none, as `k` is; `p` may also be 1."""

    stream: bool | None = None
    max_tokens: Natural | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    k: Annotated[int, Meta(ge=0, le=500)] | None = None
    p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop_sequences: list[str] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    response_format: CohereFormat | None = None
    safety_mode: SafetyMode | None = None


class Tokens(msgspec.Struct, frozen=True):
    """Of the served model."""

    input_tokens: int
    output_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> "Tokens":
        """In Cohere's words."""
        return cls(usage.input_tokens, usage.output_tokens)


def task_of(settings: CohereSettings, **words: Any) -> Generate:  # `Any`: fields of `Generate`
    """A `Generate` of these settings; `words` are its other fields.

    Raises InvalidRequest or UnsupportedParameter, which names the field.
    """
    _check_safety(settings.safety_mode)
    form, pattern = _form(settings.response_format)
    return Generate(
        form=form,
        pattern=pattern,
        tokens_max=settings.max_tokens,
        stop=checked_stop(settings.stop_sequences, field="stop_sequences", count_max=STOPS_MAX),
        sampling=Sampling(
            temperature=TEMPERATURE if settings.temperature is None else settings.temperature,
            top_p=P if settings.p is None else settings.p or 1.0,
            top_k=settings.k or 0,
            frequency_penalty=settings.frequency_penalty or 0.0,
            presence_penalty=settings.presence_penalty or 0.0,
            seed=None if settings.seed is None else seed_of(settings.seed),
        ),
        is_streamed=bool(settings.stream),
        **words,
    )


def finish_of(finish: Finish, stop: str) -> FinishReason:
    """Why a text ended; `stop` is the sequence before which it did."""
    match finish:
        case "length":
            return "MAX_TOKENS"
        case "tool_calls":
            return "TOOL_CALL"
        case "stop":
            return "STOP_SEQUENCE" if stop else "COMPLETE"


def as_ascii(event: object) -> bytes:
    """JSON on one line without a byte over 127.

    cohere-python's older line decodes each piece of a stream that it receives apart, and takes U+2028 for a line's end.
    """
    return json.dumps(msgspec.to_builtins(event), separators=(",", ":")).encode()


def _check_safety(mode: SafetyMode | None) -> None:
    """Cohere tells its models in their prompt to be safe. These are told nothing, so "STRICT" cannot be kept."""
    if mode == "STRICT":
        raise UnsupportedParameter(
            "'safety_mode' is 'STRICT', which is not served: no safety instruction is put into prompts here",
            param="safety_mode",
        )


def _form(wanted: CohereFormat | None) -> tuple[Literal["text", "json_object", "json_schema"], bytes]:
    if wanted is None:
        return "text", b""
    schema = wanted.schema if wanted.json_schema is None else wanted.json_schema
    name = "response_format.schema" if wanted.json_schema is None else "response_format.json_schema"
    if schema is None:
        return wanted.type, b""
    if wanted.type == "text":
        raise InvalidRequest(f"'{name}' needs 'response_format.type' to be 'json_object'", param=name)
    check_schema(schema, name)
    if wanted.schema is not None and wanted.json_schema is not None:
        check_schema(wanted.schema, "response_format.schema")
        if wanted.schema != wanted.json_schema:
            raise InvalidRequest("'response_format' has two schemas; send one", param="response_format.schema")
    return "json_schema", msgspec.json.encode(schema)
