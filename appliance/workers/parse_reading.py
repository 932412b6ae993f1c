"""What an extraction asks of a model that reads raw texts and finds spans by itself."""

from collections.abc import Sequence

from appliance.errors import EngineFailed, InvalidRequest
from appliance.jobs import Extract, Job, Part, Span, Spans
from appliance.presets import Facts
from appliance.workers.outcomes import kinds
from appliance.workers.raw_texts import RawTexts
from appliance.workers.read_job import Reading, check_labels, cut_of, matrix
from appliance.workers.wire import Loaded

SPAN_NUMBERS = 4  # start, end, index of the label, score


class ParseReader:
    """How one such model reads jobs. Thread-safe."""

    def __init__(self, texts: RawTexts, facts: Facts, card: Loaded) -> None:
        self._texts = texts
        self._facts = facts
        self._labels = card.labels

    def read(self, job: Job) -> Reading:
        """Raises InvalidRequest or TooLong, naming the field."""
        task = job.task
        if not isinstance(task, Extract):
            raise InvalidRequest(f"{self._facts.name} only extracts; choose another model", param="model")
        if not task.inputs:
            raise InvalidRequest("there is no input; send one at least", param="input")
        check_labels(task.labels, known=kinds(self._labels))
        texts = self._texts.cut(task.inputs, truncation=cut_of(task), first_index=job.first_index)

        def answer(buffers: Sequence[memoryview], width: int, bytes_max: int) -> list[Part]:
            return [
                Spans(
                    tuple(
                        self._spans(buffer, width, task, text.start)
                        for buffer, text in zip(buffers, texts, strict=True)
                    )
                )
            ]

        return Reading([text.tokens for text in texts], answer)

    def _spans(self, buffer: memoryview, width: int, task: Extract, offset: int) -> tuple[Span, ...]:
        if width != SPAN_NUMBERS:
            raise EngineFailed(f"the engine gave rows of {width} numbers where a span has {SPAN_NUMBERS}")
        found = []
        for start, end, label, score in matrix([buffer], width).tolist():
            name = self._labels[int(label)]
            if score >= task.score_min and (not task.labels or name in task.labels):
                found.append(Span(offset + int(start), offset + int(end), name, score))
        return tuple(found)
