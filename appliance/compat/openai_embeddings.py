"""`POST /v1/embeddings` in OpenAI's dialect: body → `EmbeddingsCall` → `Embed` tasks, and rows → answer.

Wire facts: shared contract of openai-python and openai-node (both ask for base64 when the caller names no format, both
trust `data` to be in input order).
"""

from collections.abc import Sequence
from typing import Literal

import msgspec

from appliance.compat import formats, vectors
from appliance.compat.bodies import BodyDecoder
from appliance.compat.formats import Format
from appliance.errors import InvalidRequest, UnsupportedParameter
from appliance.jobs import Embed, Intent

INPUTS_MAX = 2048
DIMENSIONS_MAX = 65_536

EncodingFormat = Literal["float", "base64"]


class EmbeddingsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields OpenAI documents, and ours (`input_type`). Explicit nulls mean absent."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: EncodingFormat | None = None
    dimensions: int | None = None
    user: str | None = None
    input_type: Intent | None = None


class EmbeddingsCall(msgspec.Struct, frozen=True):
    """A checked request."""

    model: str  # as the client wrote it: echoed in the answer
    inputs: tuple[str, ...]
    encoding_format: EncodingFormat
    width: int | None
    intent: Intent | None
    ignored: tuple[str, ...]

    def task(self, first: int, last: int) -> Embed:
        """The task for `inputs[first:last]`."""
        return Embed(inputs=self.inputs[first:last], intent=self.intent, width=self.width)


class _Embedding(msgspec.Struct, frozen=True):
    object: Literal["embedding"]
    index: int
    embedding: memoryview | msgspec.Raw


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    total_tokens: int


class EmbeddingsAnswer(msgspec.Struct, frozen=True):
    """The answer."""

    object: Literal["list"]
    data: list[_Embedding]
    model: str
    usage: _Usage


_bodies = BodyDecoder(EmbeddingsBody)


def decode(body: bytes, form: Format = "json") -> EmbeddingsCall:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body, form)
    if fields.dimensions is not None and not 1 <= fields.dimensions <= DIMENSIONS_MAX:
        raise InvalidRequest(
            f"'dimensions' is {fields.dimensions}; it must be between 1 and {DIMENSIONS_MAX}", param="dimensions"
        )
    return EmbeddingsCall(
        model=fields.model,
        inputs=_texts(fields.input),
        encoding_format=fields.encoding_format or "float",
        width=fields.dimensions,
        intent=fields.input_type,
        ignored=ignored,
    )


def encode(
    call: EmbeddingsCall, rows: Sequence[memoryview], *, width: int, input_tokens: int, form: Format = "json"
) -> bytes:
    """The answer. `rows` are the request's vectors in input order, in one or more buffers of whole vectors.

    In msgpack a vector is its bytes, whatever `encoding_format` says.
    """
    is_float = call.encoding_format == "float" and form == "json"
    data: list[_Embedding] = []
    for buffer in rows:
        for position in range(len(buffer) // (vectors.FLOAT_BYTES * width)):
            one = vectors.row(buffer, position, width=width)
            data.append(_Embedding("embedding", len(data), vectors.json_floats(one) if is_float else one))
    return formats.encode(EmbeddingsAnswer("list", data, call.model, _Usage(input_tokens, input_tokens)), form)


def _texts(value: str | list[str | int | list[int]]) -> tuple[str, ...]:
    values = [value] if isinstance(value, str) else value
    if not values:
        raise InvalidRequest("'input' is empty; send at least one text", param="input")
    if not isinstance(values[0], str):
        raise UnsupportedParameter(
            "'input' holds token ids; send text (LangChain: check_embedding_ctx_length=False)", param="input"
        )
    if len(values) > INPUTS_MAX:
        raise InvalidRequest(f"'input' has {len(values)} texts, the limit is {INPUTS_MAX}; split it", param="input")
    texts: list[str] = []
    for index, text in enumerate(values):
        if not isinstance(text, str):
            raise InvalidRequest(f"'input[{index}]' is not a text, the others are", param=f"input[{index}]")
        if not text:
            raise InvalidRequest(f"'input[{index}]' is an empty text", param=_name(index, value))
        texts.append(text)
    return tuple(texts)


def _name(index: int, value: object) -> str:
    return "input" if isinstance(value, str) else f"input[{index}]"
