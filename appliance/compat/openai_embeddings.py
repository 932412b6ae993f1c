"""`POST /v1/embeddings`: body → `EmbeddingsCall` → `Embed` tasks, and the parts of an answer → answer.

OpenAI's dialect, and the fields by which Jina's and Voyage's differ from it. openai-python and openai-node both ask for
base64 when the caller names no format, and trust `data` to be in input order.
"""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeVar, get_args

import msgspec

from appliance.compat import formats, token_ids, vectors
from appliance.compat.bodies import BodyDecoder
from appliance.compat.formats import Format
from appliance.compat.quantized import ByteType, quantized
from appliance.compat.vectors import VectorRow
from appliance.compat.widths import Widths, check_width
from appliance.errors import InvalidRequest, UnsupportedParameter
from appliance.jobs import Intent, Output, Part, Rows, SparseRow, SparseRows, TokenRows, Truncation

V = TypeVar("V")

INPUTS_MAX = 2048

EncodingFormat = Literal["float", "base64"]
NumberType = Literal["float", "int8", "uint8", "binary", "ubinary"]
_JinaType = Literal["float", "base64", "binary", "ubinary"]

# The words of all dialects. What is neither a query nor a document gets no prompt of its own.
_INTENTS: dict[str, Intent | None] = {
    "query": "query",
    "search_query": "query",
    "retrieval.query": "query",
    "code.query": "query",
    "nl2code.query": "query",
    "document": "document",
    "passage": "document",
    "search_document": "document",
    "retrieval.passage": "document",
    "code.passage": "document",
    "nl2code.passage": "document",
    "classification": None,
    "clustering": None,
    "separation": None,
    "text-matching": None,
}


class EmbeddingsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that OpenAI documents, ours (`input_type`, `outputs`), Jina's and Voyage's. Nulls mean absent."""

    input: str | list[str | int | list[int]]
    model: str | None = None  # needed, unless the path names one
    encoding_format: EncodingFormat | None = None
    dimensions: int | None = None
    user: str | None = None
    input_type: str | None = None
    outputs: list[Output] | None = None
    # Jina's
    task: str | None = None
    embedding_type: _JinaType | list[_JinaType] | None = None
    normalized: bool | None = None
    truncate: bool | None = None
    late_chunking: bool | None = None
    # Voyage's
    truncation: bool | None = None
    output_dimension: int | None = None
    output_dtype: NumberType | None = None


class EmbeddingsCall(msgspec.Struct, frozen=True):
    """A checked request. It holds either texts or arrays of token ids."""

    model: str  # as the client wrote it: echoed in the answer
    texts: tuple[str, ...]
    ids: tuple[tuple[int, ...], ...]
    numbers: NumberType
    is_base64: bool
    width: int | None
    intent: Intent | None
    outputs: tuple[Output, ...] | None  # None: what the model gives first
    may_cut: bool | None  # None: the client leaves it open
    ignored: tuple[str, ...]

    def truncation(self, policy: Truncation, outputs: Sequence[Output]) -> Truncation:
        """The client's word wins over the policy of the name; only dense vectors have a mean."""
        if self.may_cut is None:
            return "end" if policy == "chunk_mean" and tuple(outputs) != ("dense",) else policy
        return "end" if self.may_cut else "none"


class _Sparse(msgspec.Struct, frozen=True):
    indices: VectorRow  # of the vocabulary, ascending; int32
    values: VectorRow  # float32


class _Embedding(msgspec.Struct, frozen=True, omit_defaults=True):
    object: Literal["embedding"]
    index: int
    # Empty where no dense vector was asked for: clients read it unasked.
    embedding: VectorRow | list[float]
    sparse: _Sparse | None = None
    multivector: list[VectorRow] | None = None


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


def decode(body: bytes, form: Format = "json", *, model: str | None = None) -> EmbeddingsCall:
    """`model` is the one that the path names. Raises MalformedBody, InvalidRequest or UnsupportedParameter.

    `param` names the field at fault.
    """
    fields, ignored = _bodies.decode(body, form)
    name = model or fields.model
    if name is None:
        raise InvalidRequest("missing required field 'model'", param="model")
    _check_served(fields)
    texts, ids = _inputs(fields.input)
    return EmbeddingsCall(
        model=name,
        texts=texts,
        ids=ids,
        numbers=_numbers(fields),
        is_base64=fields.encoding_format == "base64" or fields.embedding_type in ("base64", ["base64"]),
        width=_same(fields.dimensions, fields.output_dimension, "dimensions", "output_dimension"),
        intent=_intent(fields),
        outputs=_outputs(fields),
        may_cut=_same(fields.truncate, fields.truncation, "truncate", "truncation"),
        ignored=ignored,
    )


def asking_for(call: EmbeddingsCall, outputs: tuple[Output, ...]) -> EmbeddingsCall:
    """The call as if it had named these outputs: those of a model whose first is no dense vector."""
    return msgspec.structs.replace(call, outputs=outputs)


def intent_of(word: str, *, field: str) -> Intent | None:
    """Of any dialect's word for it. Raises InvalidRequest, which names the field, for another word."""
    if word not in _INTENTS:
        raise InvalidRequest(
            f"'{field}' is '{word[:50]}'; it must be one of {', '.join(_INTENTS)}",
            param=field,
        )
    return _INTENTS[word]


def encode(
    call: EmbeddingsCall, parts: Sequence[Part], *, widths: Widths, input_tokens: int, form: Format = "json"
) -> bytes:
    """The answer. `parts` are the request's, in input order for each output.

    In msgpack a vector is its bytes, whatever `encoding_format` says.
    """
    is_text = not call.is_base64 and form == "json"
    if call.outputs is None or call.outputs == ("dense",):
        rows = _dense(call, parts, widths, is_text=is_text)
        data = [_Embedding("embedding", index, row) for index, row in enumerate(rows)]
    else:
        data = _several(call, parts, widths, is_text=is_text)
    return formats.encode(EmbeddingsAnswer("list", data, call.model, _Usage(input_tokens, input_tokens)), form)


def _dense(
    call: EmbeddingsCall, parts: Sequence[Part], widths: Widths, *, is_text: bool
) -> Iterator[VectorRow] | list[VectorRow]:
    if call.numbers == "float" and widths.padded is None:
        return vectors.rows([part for part in parts if isinstance(part, Rows)], is_text=is_text)
    own = vectors.matrix(parts)
    padded = widths.pad(own)
    if call.numbers == "float":
        return vectors.array_rows(padded, is_text=is_text)
    kind: ByteType = call.numbers
    return vectors.array_rows(quantized(padded, kind, width=own.shape[1]), is_text=is_text)


def _several(call: EmbeddingsCall, parts: Sequence[Part], widths: Widths, *, is_text: bool) -> list[_Embedding]:
    """Each input's answer in all the outputs that were asked for."""
    outputs = call.outputs or ()
    count = len(call.texts) or len(call.ids)
    empty: list[list[float]] = [[] for _ in range(count)]
    dense = list(_dense(call, parts, widths, is_text=is_text)) if "dense" in outputs else empty
    sparse = [row for part in parts if isinstance(part, SparseRows) for row in part.inputs]
    tokens = [(row, part.width) for part in parts if isinstance(part, TokenRows) for row in part.inputs]
    return [
        _Embedding(
            "embedding",
            index,
            dense[index],
            _sparse(sparse[index], is_text=is_text) if sparse else None,
            list(vectors.rows([Rows(*tokens[index])], is_text=is_text)) if tokens else None,
        )
        for index in range(count)
    ]


def _sparse(row: SparseRow, *, is_text: bool) -> _Sparse:
    return _Sparse(
        vectors.json_integers(row.indices) if is_text else memoryview(row.indices),
        vectors.json_floats(row.values) if is_text else memoryview(row.values),
    )


def _inputs(value: str | list[str | int | list[int]]) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]:
    """Texts or arrays of ids: the first input says which."""
    values = [value] if isinstance(value, str) else value
    if not values:
        raise InvalidRequest("'input' is empty; send at least one text", param="input")
    if isinstance(values[0], int):
        return (), token_ids.arrays(values)
    if len(values) > INPUTS_MAX:
        raise InvalidRequest(f"'input' has {len(values)} inputs, the limit is {INPUTS_MAX}; split it", param="input")
    if isinstance(values[0], list):
        return (), token_ids.arrays(values)
    texts: list[str] = []
    for index, text in enumerate(values):
        if not isinstance(text, str):
            raise InvalidRequest(f"'input[{index}]' is not a text, the others are", param=f"input[{index}]")
        if not text:
            name = "input" if isinstance(value, str) else f"input[{index}]"
            raise InvalidRequest(f"'input[{index}]' is an empty text", param=name)
        texts.append(text)
    return tuple(texts), ()


def _check_served(fields: EmbeddingsBody) -> None:
    check_width(fields.dimensions, field="dimensions")
    check_width(fields.output_dimension, field="output_dimension")
    if fields.late_chunking:
        raise UnsupportedParameter("'late_chunking' is not served; leave it out", param="late_chunking")
    if fields.normalized is False:
        raise UnsupportedParameter("'normalized' is false; vectors here have length one", param="normalized")
    if isinstance(fields.embedding_type, list) and len(fields.embedding_type) != 1:
        raise UnsupportedParameter("'embedding_type' names several types; ask for one", param="embedding_type")


def _same(first: V | None, second: V | None, one: str, other: str) -> V | None:
    """The value of one of two dialects' fields for the same. Raises InvalidRequest where they differ."""
    if first is not None and second is not None and first != second:
        raise InvalidRequest(f"'{one}' is {first} and '{other}' is {second}; send one of them", param=other)
    return second if first is None else first


def _intent(fields: EmbeddingsBody) -> Intent | None:
    if fields.input_type is not None:
        return intent_of(fields.input_type, field="input_type")
    return intent_of(fields.task, field="task") if fields.task is not None else None


def _numbers(fields: EmbeddingsBody) -> NumberType:
    named = fields.embedding_type
    kind = named[0] if isinstance(named, list) else named
    numbers: NumberType | None = "float" if kind == "base64" else kind
    return _same(numbers, fields.output_dtype, "embedding_type", "output_dtype") or "float"


def _outputs(fields: EmbeddingsBody) -> tuple[Output, ...] | None:
    if fields.outputs is None:
        return None
    if not fields.outputs:
        raise InvalidRequest(f"'outputs' is empty; name some of {', '.join(get_args(Output))}", param="outputs")
    return tuple(dict.fromkeys(fields.outputs))
