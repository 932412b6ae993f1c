"""What a rerank asks of a model: of a cross-encoder pairs, of one that only embeds how like query and documents are.

`Rerank.document_tokens_max` cuts a document's text first, either way.
"""

from collections.abc import Sequence
from typing import Protocol

import msgspec

from appliance.errors import ApplianceError, InvalidRequest
from appliance.jobs import Part, Rerank, Scores
from appliance.presets import Facts
from appliance.workers import likeness, outcomes
from appliance.workers.embedding_reading import TOKEN_VECTORS_BYTES_MAX
from appliance.workers.prompts import ModelPrompts
from appliance.workers.read_job import FLOAT_BYTES, QUERY, Reading, matrix
from appliance.workers.tokenize import Tokenizer
from appliance.workers.tokens import Tokens
from appliance.workers.wire import Loaded


class RerankReader(Protocol):
    """How one model reads a `Rerank`."""

    def read(self, task: Rerank, *, first_index: int) -> Reading:
        """Blocks. Raises InvalidRequest or TooLong, naming the field."""


def rerank_reader(tokenizer: Tokenizer, facts: Facts, card: Loaded, prompts: ModelPrompts) -> RerankReader:
    """By what the facts say of the model."""
    return LikenessReader(tokenizer, facts, card, prompts) if facts.rerank_by else PairReader(tokenizer)


class PairReader:
    """A cross-encoder: each query and document is one input of two texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def read(self, task: Rerank, *, first_index: int) -> Reading:
        """See `RerankReader`."""
        documents = _cut(task, self._tokenizer)
        pairs = [(task.query, document) for document in documents]
        items = self._tokenizer.encode_pairs(pairs, truncation=task.truncation, first_index=first_index)
        return Reading(_marked(items, documents, task), _relevance)


class LikenessReader:
    """A model that embeds: the query is one item, each document another."""

    def __init__(self, tokenizer: Tokenizer, facts: Facts, card: Loaded, prompts: ModelPrompts) -> None:
        self._tokenizer = tokenizer
        self._is_by_token = facts.rerank_by == "maxsim"
        self._width = card.width
        self._prompts = prompts

    def read(self, task: Rerank, *, first_index: int) -> Reading:
        """See `RerankReader`.

        A query over the model's length loses its end like a document, but is not among the truncated: those are the
        indices of documents.
        """
        documents = _cut(task, self._tokenizer)
        items = [self._query(task), *_marked(self._documents(documents, task, first_index), documents, task)]
        owners = (QUERY, *range(len(documents)))
        if not self._is_by_token:
            return Reading(items, _by_similarity, owners)
        self._check_size(items)
        return Reading([msgspec.structs.replace(item, rows="per_token") for item in items], _by_tokens, owners)

    def _query(self, task: Rerank) -> Tokens:
        try:
            (query,) = self._tokenizer.encode([task.query], prompt=self._prompts.query, truncation=task.truncation)
        except ApplianceError as error:
            raise type(error)(error.message.replace("input 0", "'query'"), param="query") from error
        return query

    def _documents(self, documents: Sequence[str], task: Rerank, first_index: int) -> list[Tokens]:
        prompt = self._prompts.document
        try:
            return self._tokenizer.encode(documents, prompt=prompt, truncation=task.truncation, first_index=first_index)
        except ApplianceError as error:
            param = (error.param or "").replace("input[", "documents[")
            raise type(error)(error.message.replace("input ", "document ", 1), param=param) from error

    def _check_size(self, items: Sequence[Tokens]) -> None:
        size = FLOAT_BYTES * self._width * sum(item.count for item in items)
        if size > TOKEN_VECTORS_BYTES_MAX:
            raise InvalidRequest(
                f"the tokens of {len(items) - 1} documents have vectors of {size} B, at most "
                f"{TOKEN_VECTORS_BYTES_MAX} B are computed at once; send shorter documents, or fewer",
                param="documents",
            )


def _cut(task: Rerank, tokenizer: Tokenizer) -> Sequence[str]:
    limit = task.document_tokens_max
    if limit is None or limit >= tokenizer.tokens_max:
        return task.documents
    return tokenizer.cut(task.documents, tokens_max=limit)


def _marked(items: Sequence[Tokens], documents: Sequence[str], task: Rerank) -> list[Tokens]:
    """The documents' items; those whose text was cut before they were read are truncated too."""
    return [
        msgspec.structs.replace(item, is_truncated=True) if len(document) < len(whole) else item
        for item, document, whole in zip(items, documents, task.documents, strict=True)
    ]


def _relevance(buffers: Sequence[memoryview], width: int, bytes_max: int) -> list[Part]:
    return [Scores(outcomes.relevance(matrix(buffers, width)).astype("<f4").tobytes())]


def _by_similarity(buffers: Sequence[memoryview], width: int, bytes_max: int) -> list[Part]:
    rows = matrix(buffers, width)
    return [_scores(likeness.similarity(rows[:1], rows[1:]))]


def _by_tokens(buffers: Sequence[memoryview], width: int, bytes_max: int) -> list[Part]:
    query, *documents = (matrix([buffer], width) for buffer in buffers)
    return [_scores(likeness.maxsim(query, documents))]


def _scores(found: likeness.Likeness) -> Scores:
    return Scores(likeness.relevance(found).astype("<f4").tobytes())
