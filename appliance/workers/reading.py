"""What a task asks of a model: its inputs as tokens, and how the model's numbers become the parts of an answer.

An engine knows few things: vectors of texts ("embed"), logits of texts or pairs ("score"), logits of tokens ("tag"),
spans of raw texts ("parse": see parse_reading.py). What a rerank or an extraction is, is known here.
"""

from collections.abc import Sequence
from typing import assert_never

import msgspec

from appliance.errors import InvalidRequest
from appliance.jobs import (
    Classify,
    Decide,
    Detokenize,
    Embed,
    Extract,
    Generate,
    Job,
    Labels,
    Part,
    Rerank,
    Spans,
    Task,
    Text,
    Tokenize,
    Tokenized,
)
from appliance.presets import Facts
from appliance.workers import outcomes
from appliance.workers.embedding_reading import EmbeddingReader
from appliance.workers.read_job import Reading, at_once, check_labels, cut_of, matrix
from appliance.workers.rerank_reading import rerank_reader
from appliance.workers.tokenize import Tokenizer
from appliance.workers.vector_space import VectorSpace
from appliance.workers.wire import Loaded


class Reader:
    """How one model reads jobs. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, facts: Facts, card: Loaded, space: VectorSpace) -> None:
        self.tokenizer = tokenizer
        self.facts = facts
        self.card = card
        self._embedding = EmbeddingReader(tokenizer, facts, card, space)
        self._rerank = rerank_reader(tokenizer, facts, card, space.prompts)

    def read(self, job: Job) -> Reading:
        """Blocks. Raises InvalidRequest or TooLong, naming the field."""
        self._check_served(job.task)
        reading = self._read(job)
        if not reading.items and not isinstance(job.task, Tokenize | Detokenize):
            raise InvalidRequest("there is no input; send one at least", param="input")
        return reading

    def _read(self, job: Job) -> Reading:
        match job.task:
            case Embed() as task:
                return self._embedding.read(task, first_index=job.first_index)
            case Rerank() as task:
                return self._rerank.read(task, first_index=job.first_index)
            case Classify() as task:
                return self._classify(task, first_index=job.first_index)
            case Extract() as task:
                return self._extract(task, first_index=job.first_index)
            case Tokenize(text=text):
                ids, pieces = self.tokenizer.pieces(text)
                return at_once(Tokenized(ids, pieces))
            case Detokenize(ids=ids):
                return at_once(Text(self.tokenizer.native.text(ids)))
            case Generate() | Decide():
                raise InvalidRequest(f"{self.facts.name} writes no text; choose another model", param="model")
            case _:
                assert_never(job.task)

    def _check_served(self, task: Task) -> None:
        kind = kind_of(task)
        if isinstance(task, Tokenize | Detokenize):
            return  # of any model
        if kind not in self.facts.tasks:
            served = ", ".join(self.facts.tasks)
            raise InvalidRequest(f"{self.facts.name} serves {served}, not {kind}; choose another model", param="model")

    def _classify(self, task: Classify, *, first_index: int) -> Reading:
        inputs = self.tokenizer.encode(task.inputs, truncation=cut_of(task), first_index=first_index)
        activation: outcomes.Activation = "sigmoid" if self.card.activation == "sigmoid" else "softmax"

        def answer(buffers: Sequence[memoryview], width: int, bytes_max: int) -> list[Part]:
            found = outcomes.probabilities(matrix(buffers, width), activation=activation)
            return [Labels(self.card.labels, found.astype("<f4").tobytes(), activation == "sigmoid")]

        return Reading(inputs, answer)

    def _extract(self, task: Extract, *, first_index: int) -> Reading:
        check_labels(task.labels, known=outcomes.kinds(self.card.labels))
        marked = self.tokenizer.encode_marked(task.inputs, truncation=cut_of(task), first_index=first_index)

        def answer(buffers: Sequence[memoryview], width: int, bytes_max: int) -> list[Part]:
            found = [
                outcomes.spans(
                    matrix([buffer], width),
                    offsets=text.offsets,
                    words=text.words,
                    labels=self.card.labels,
                    wanted=task.labels,
                    score_min=task.score_min,
                )
                for buffer, text in zip(buffers, marked, strict=True)
            ]
            return [Spans(tuple(found))]

        return Reading([msgspec.structs.replace(text.tokens, rows="per_token") for text in marked], answer)


def kind_of(task: Task) -> str:
    """The task's name, as presets list it."""
    return type(task).__name__.lower()
