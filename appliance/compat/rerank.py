"""Reranking in the dialects of Cohere (v1 and v2), Jina and Voyage: body → `RerankCall` → `Rerank` tasks → answer.

One body takes the fields of all of them, on every path: clients mix them. One answer has Cohere's fields, and Jina's
`model` and `usage` beside them; a request with a field that only Voyage has (`top_k`, `truncation`) gets Voyage's
`object` and `data` as well.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from appliance.compat import cohere_meta
from appliance.compat.bodies import BodyDecoder
from appliance.compat.cohere_meta import BilledUnits, Version
from appliance.compat.formats import Format
from appliance.errors import InvalidRequest, UnsupportedParameter
from appliance.jobs import Rerank

DOCUMENTS_MAX = 10_000
QUERY_BYTES_MAX = 64 * 1024  # each chunk repeats the query; Cohere reads 2,048 tokens of it, models here fewer
DOCUMENT_TOKENS_MAX = 4096  # what Cohere's v2 takes of a document unless told otherwise
TOKENS_MAX = 2**31 - 1  # what a job can carry; no model reads so many
TEXT_FIELD = "text"

# Cohere's price list: a search is one query with up to 100 documents; a document counts again for every 500 tokens.
DOCUMENTS_OF_A_SEARCH = 100
TOKENS_OF_A_DOCUMENT = 500

Integer = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # what msgpack can carry back
Value = str | bool | Integer | float | None
Document = str | dict[str, Value]
# Said in the OpenAPI document only: `decode` refuses in words of its own.
Positive = Annotated[int, Meta(extra_json_schema={"minimum": 1})]
Query = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
Documents = Annotated[list[Document], Meta(extra_json_schema={"minItems": 1, "maxItems": DOCUMENTS_MAX})]
RankFields = Annotated[list[str], Meta(extra_json_schema={"minItems": 1})]


class RerankBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of Cohere, Jina and Voyage. Explicit nulls mean absent."""

    query: Query
    documents: Documents
    model: str | None = None  # absent: the first served model that reranks
    top_n: Positive | None = None
    top_k: Positive | None = None
    return_documents: bool | None = None
    rank_fields: RankFields | None = None
    max_chunks_per_doc: Positive | None = None
    max_tokens_per_doc: Positive | None = None
    truncation: bool | None = None
    priority: int | None = None
    instruction: str | None = None
    return_embeddings: bool | None = None


class RerankCall(msgspec.Struct, frozen=True):
    """A checked request."""

    body: RerankBody
    version: Version
    texts: tuple[str, ...]  # what is ranked of each document
    results_max: int
    ignored: tuple[str, ...]

    @property
    def shared_bytes(self) -> int:
        """What each task holds besides its documents."""
        return len(self.body.query.encode())

    def task(self, first: int, last: int, *, refuses_long: bool) -> Rerank:
        """The task for `documents[first:last]`. `refuses_long` is the alias' policy; the client's word wins."""
        is_cut = not refuses_long if self.body.truncation is None else self.body.truncation
        return Rerank(
            query=self.body.query,
            documents=self.texts[first:last],
            document_tokens_max=self._document_tokens_max(),
            truncation="end" if is_cut else "none",
        )

    def _document_tokens_max(self) -> int | None:
        default = DOCUMENT_TOKENS_MAX if self.version == "2" else None
        asked = self.body.max_tokens_per_doc
        return default if asked is None else min(asked, TOKENS_MAX)


class RankedDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """One document's relevance. `document` is there on request: as it was sent, a bare text as `{"text": …}`."""

    index: int  # in the request
    relevance_score: float  # in [0, 1]
    document: Mapping[str, Value] | None = None


class VoyageDocument(msgspec.Struct, frozen=True, omit_defaults=True):
    """The same in Voyage's words: `document` is the text that was ranked."""

    index: int
    relevance_score: float
    document: str | None = None


class RerankUsage(msgspec.Struct, frozen=True):
    """Jina's and Voyage's: the tokens that were computed, the query's as often as the model read it."""

    total_tokens: int
    prompt_tokens: int


class RerankAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The most relevant documents, best first; of equal ones the first in the request."""

    id: str
    results: list[RankedDocument]
    meta: cohere_meta.Meta
    model: str
    usage: RerankUsage
    object: Literal["list"] | None = None
    data: list[VoyageDocument] | None = None


_bodies = BodyDecoder(RerankBody)


def decode(body: bytes, version: Version, form: Format = "json") -> RerankCall:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body, form)
    _check_query(fields.query)
    _check_served(fields)
    count = len(fields.documents)
    if not 1 <= count <= DOCUMENTS_MAX:
        raise InvalidRequest(
            f"'documents' has {count} documents; it must have between 1 and {DOCUMENTS_MAX}", param="documents"
        )
    if fields.max_chunks_per_doc is not None and fields.max_chunks_per_doc > 1:
        ignored = (*ignored, "max_chunks_per_doc")
    rank_fields = _rank_fields(fields.rank_fields)
    return RerankCall(
        body=fields,
        version=version,
        texts=tuple(_text(document, index, rank_fields) for index, document in enumerate(fields.documents)),
        results_max=_results_max(fields),
        ignored=ignored,
    )


def answer(
    call: RerankCall, scores: npt.NDArray[np.float32], *, answer_id: str, model: str, input_tokens: int
) -> RerankAnswer:
    """The answer; `scores` are those of all documents, in the request's order."""
    order = np.argsort(-scores, kind="stable")[: call.results_max]
    ranked = [(int(index), float(scores[index])) for index in order]
    is_echoed = bool(call.body.return_documents)
    is_voyages = call.body.top_k is not None or call.body.truncation is not None
    return RerankAnswer(
        id=answer_id,
        results=[
            RankedDocument(index, score, _echo(call.body.documents[index]) if is_echoed else None)
            for index, score in ranked
        ],
        meta=cohere_meta.meta(call.version, BilledUnits(search_units=search_units(len(scores), input_tokens))),
        model=call.body.model or model,
        usage=RerankUsage(input_tokens, input_tokens),
        object="list" if is_voyages else None,
        data=[VoyageDocument(index, score, call.texts[index] if is_echoed else None) for index, score in ranked]
        if is_voyages
        else None,
    )


def search_units(documents: int, input_tokens: int) -> int:
    """Cohere's unit of price. A document's own length is not known here, so long ones are counted by their sum."""
    counted = max(documents, -(-input_tokens // TOKENS_OF_A_DOCUMENT))
    return -(-counted // DOCUMENTS_OF_A_SEARCH)


def _check_query(query: str) -> None:
    if not query.strip():
        raise InvalidRequest("'query' is empty; send some text", param="query")
    size = len(query.encode())
    if size > QUERY_BYTES_MAX:
        raise InvalidRequest(f"'query' is {size} B of text, the limit is {QUERY_BYTES_MAX} B", param="query")


def _check_served(fields: RerankBody) -> None:
    if fields.instruction:
        raise UnsupportedParameter(
            "'instruction' is not served; put it into the query if the model was trained so", param="instruction"
        )
    if fields.return_embeddings:
        raise UnsupportedParameter(
            "'return_embeddings' is not served; ask /v1/embeddings for them", param="return_embeddings"
        )
    for name in ("top_n", "top_k", "max_chunks_per_doc", "max_tokens_per_doc"):
        value = getattr(fields, name)
        if value is not None and value < 1:
            raise InvalidRequest(f"'{name}' is {value}; it must be at least 1", param=name)


def _results_max(fields: RerankBody) -> int:
    if fields.top_n is not None and fields.top_k is not None and fields.top_n != fields.top_k:
        raise InvalidRequest(f"'top_n' is {fields.top_n} and 'top_k' is {fields.top_k}; send one", param="top_k")
    return fields.top_n or fields.top_k or len(fields.documents)


def _rank_fields(names: Sequence[str] | None) -> Sequence[str]:
    if names is None:
        return (TEXT_FIELD,)
    if not names:
        raise InvalidRequest(
            "'rank_fields' is empty; name a field of the documents or leave it out", param="rank_fields"
        )
    return names


def _text(document: Document, index: int, rank_fields: Sequence[str]) -> str:
    """What is ranked: a text itself, or an object's fields in the order asked for, those that it has, a line each."""
    if isinstance(document, str):
        return document
    found = [_written(value) for name in rank_fields if (value := document.get(name)) is not None]
    if not found:
        wanted = ", ".join(f"'{name[:100]}'" for name in rank_fields[:10])
        raise InvalidRequest(f"'documents[{index}]' has no {wanted}", param=f"documents[{index}]")
    return "\n".join(found)


def _written(value: Value) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _echo(document: Document) -> Mapping[str, Value]:
    return {TEXT_FIELD: document} if isinstance(document, str) else document
