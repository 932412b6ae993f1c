"""`POST /v1/embed` and `POST /v2/embed` in Cohere's dialect: body → `EmbedCall` → `Embed` tasks, and vectors → answer.

The two versions differ in what they answer to a client that names no types: v1 bare lists of floats, v2 lists by type.
`response_type` tells cohere-python which it is. Only types that were asked for are there: some clients join all they
find. Fields that only v2 documents are taken on v1 too.
"""

import uuid
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from appliance.compat.bodies import BodyDecoder
from appliance.compat.cohere_inputs import TRUNCATIONS, Truncate, checked
from appliance.compat.cohere_meta import BilledUnits, Meta, Version, meta
from appliance.compat.formats import Format
from appliance.compat.quantized import quantized
from appliance.compat.vectors import VectorRow as Row
from appliance.compat.vectors import array_rows
from appliance.compat.widths import check_width
from appliance.errors import InvalidRequest, UnsupportedParameter
from appliance.jobs import Intent, Truncation

TOKENS_MAX = 2**31 - 1  # more than any model takes, and few enough for every decoder on the way

EmbeddingType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]
InputType = Literal["search_document", "search_query", "classification", "clustering", "image"]
Vectors = npt.NDArray[np.float32]

_INTENTS: dict[InputType, Intent] = {"search_query": "query", "search_document": "document"}


class Content(msgspec.Struct, frozen=True):
    """A part of an input."""

    type: str
    text: str | None = None


class Input(msgspec.Struct, frozen=True):
    """One input of several parts; their texts are embedded as one, a line each."""

    content: list[Content]


class EmbedBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that Cohere documents. Explicit nulls mean absent."""

    texts: list[str] | None = None
    inputs: list[Input] | None = None
    images: list[str] | None = None
    model: str | None = None
    input_type: InputType | None = None
    embedding_types: list[EmbeddingType] | None = None
    truncate: Truncate | None = None
    output_dimension: int | None = None
    max_tokens: int | None = None
    priority: int | None = None


class EmbedCall(msgspec.Struct, frozen=True):
    """A checked request."""

    version: Version
    model: str | None  # None: the default one
    texts: tuple[str, ...]
    field: Literal["texts", "inputs"]  # where the texts come from
    types: tuple[EmbeddingType, ...]
    is_by_type: bool  # how they are answered
    intent: Intent | None
    truncation: Truncation | None  # None: the client leaves it open
    width: int | None
    tokens_max: int | None
    ignored: tuple[str, ...]

    def name_of(self, index: int) -> str:
        """The client's name of one of the texts."""
        return f"{self.field}[{index}]"


class ByType(msgspec.Struct, frozen=True, omit_defaults=True):
    """The vectors, once in each of the types that were asked for."""

    floats: list[Row] | None = msgspec.field(default=None, name="float")
    int8: list[Row] | None = None
    uint8: list[Row] | None = None
    binary: list[Row] | None = None
    ubinary: list[Row] | None = None
    base64: list[Row] | None = None


class EmbedAnswer(msgspec.Struct, frozen=True):
    """The answer. `texts` are those that were embedded."""

    id: str
    response_type: Literal["embeddings_floats", "embeddings_by_type"]
    embeddings: list[Row] | ByType
    texts: tuple[str, ...]
    meta: Meta


_bodies = BodyDecoder(EmbedBody)


def decode(body: bytes, version: Version, form: Format = "json") -> EmbedCall:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body, form)
    if version == "2" and fields.model is None:
        raise InvalidRequest("missing required field 'model'", param="model")
    _check_served(fields)
    if fields.embedding_types is not None and not fields.embedding_types:
        raise InvalidRequest(
            "'embedding_types' is empty; name at least one type or leave it out", param="embedding_types"
        )
    field: Literal["texts", "inputs"] = "texts" if fields.inputs is None else "inputs"
    texts = fields.texts or [] if fields.inputs is None else [_joined(one, at) for at, one in enumerate(fields.inputs)]
    return EmbedCall(
        version=version,
        model=fields.model,
        texts=checked(texts, field=field),
        field=field,
        types=tuple(dict.fromkeys(fields.embedding_types or ("float",))),
        is_by_type=version == "2" or fields.embedding_types is not None,
        intent=_INTENTS.get(fields.input_type) if fields.input_type else None,
        truncation=TRUNCATIONS[fields.truncate] if fields.truncate else None,
        width=fields.output_dimension,
        tokens_max=fields.max_tokens,
        ignored=ignored,
    )


def answer(call: EmbedCall, vectors: Vectors, *, width: int, input_tokens: int, form: Format) -> EmbedAnswer:
    """The answer. `vectors` is [texts, numbers], of which the first `width` are the model's and the rest zeros."""
    found = {kind: _rows(vectors, kind, width=width, form=form) for kind in call.types}
    by_type = ByType(
        floats=found.get("float"),
        int8=found.get("int8"),
        uint8=found.get("uint8"),
        binary=found.get("binary"),
        ubinary=found.get("ubinary"),
        base64=found.get("base64"),
    )
    return EmbedAnswer(
        id=str(uuid.uuid4()),
        response_type="embeddings_by_type" if call.is_by_type else "embeddings_floats",
        embeddings=by_type if call.is_by_type else found["float"],
        texts=call.texts,
        meta=meta(call.version, BilledUnits(input_tokens=input_tokens)),
    )


def _rows(vectors: Vectors, kind: EmbeddingType, *, width: int, form: Format) -> list[Row]:
    match kind:
        case "base64":  # which is how JSON has bytes
            return array_rows(vectors, is_text=False)
        case "float":
            return array_rows(vectors, is_text=form == "json")
        case _:
            return array_rows(quantized(vectors, kind, width=width), is_text=form == "json")


def _check_served(fields: EmbedBody) -> None:
    if fields.images:
        raise UnsupportedParameter("'images' is not served; no model here reads images", param="images")
    if fields.input_type == "image":
        raise UnsupportedParameter("'input_type' is image; no model here reads images", param="input_type")
    if fields.texts and fields.inputs is not None:
        raise InvalidRequest("both 'texts' and 'inputs' are there; send one of them", param="inputs")
    check_width(fields.output_dimension, field="output_dimension")
    if fields.max_tokens is not None and not 1 <= fields.max_tokens <= TOKENS_MAX:
        raise InvalidRequest(
            f"'max_tokens' is {fields.max_tokens}; it must be between 1 and {TOKENS_MAX}", param="max_tokens"
        )


def _joined(one: Input, index: int) -> str:
    for position, content in enumerate(one.content):
        name = f"inputs[{index}].content[{position}]"
        if content.type != "text":
            raise UnsupportedParameter(
                f"'{name}' is of the type '{content.type[:50]}'; no model here reads anything but text", param=name
            )
        if not content.text:
            raise InvalidRequest(f"'{name}' has no text", param=name)
    return "\n".join(content.text for content in one.content if content.text)
