"""`POST /v1/extract`, ours: the named entities of texts. Body → `ExtractCall` → `Extract` tasks, and spans → answer.

Shaped like OpenAI's embeddings: `input` is one text or several, and `data` has an object for each, in order. Offsets
count Unicode code points, as Python's strings do; JavaScript's count UTF-16 units.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from appliance.compat.bodies import BodyDecoder
from appliance.compat.cohere_inputs import TRUNCATIONS, Truncate
from appliance.compat.formats import Format
from appliance.errors import InvalidRequest
from appliance.jobs import Extract, Span

INPUTS_MAX = 2048
LABELS_MAX = 100
LABEL_CHARS_MAX = 128

# Said in the OpenAPI document only: `decode` refuses in words of its own.
Labels = Annotated[list[str], Meta(extra_json_schema={"minItems": 1, "maxItems": LABELS_MAX})]


class ExtractBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The request. Explicit nulls mean absent."""

    model: str
    input: str | list[str]
    labels: Labels | None = None  # only these; all that the model finds when absent
    score_min: Annotated[float, Meta(ge=0, le=1)] | None = None
    truncate: Truncate | None = None  # in Cohere's words
    user: str | None = None


class ExtractCall(msgspec.Struct, frozen=True):
    """A checked request."""

    body: ExtractBody
    texts: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def shared_bytes(self) -> int:
        """What each task holds besides its inputs."""
        return sum(len(label.encode()) + 5 for label in self.body.labels or ())

    def task(self, first: int, last: int, *, refuses_long: bool) -> Extract:
        """The task for `input[first:last]`. `refuses_long` is the alias' policy; the client's word wins."""
        truncate: Truncate = self.body.truncate or ("NONE" if refuses_long else "END")
        return Extract(
            inputs=self.texts[first:last],
            labels=tuple(self.body.labels or ()),
            score_min=self.body.score_min or 0.0,
            truncation=TRUNCATIONS[truncate],
        )


class Entity(msgspec.Struct, frozen=True):
    """`text` is the input's code points from `start` up to `end`; `score` is the model's probability of the label."""

    start: int
    end: int
    text: str
    label: str
    score: float


class Extraction(msgspec.Struct, frozen=True):
    """What was found in one input, in the order of the text."""

    object: Literal["extraction"]
    index: int
    entities: list[Entity]


class ExtractUsage(msgspec.Struct, frozen=True):
    """The tokens that were computed."""

    prompt_tokens: int
    total_tokens: int


class ExtractAnswer(msgspec.Struct, frozen=True):
    """One object for each input, in order."""

    object: Literal["list"]
    data: list[Extraction]
    model: str
    usage: ExtractUsage


_bodies = BodyDecoder(ExtractBody)


def decode(body: bytes, form: Format = "json") -> ExtractCall:
    """Raises MalformedBody or InvalidRequest; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body, form)
    _check_labels(fields.labels)
    return ExtractCall(body=fields, texts=_texts(fields.input), ignored=ignored)


def answer(call: ExtractCall, found: Sequence[Sequence[Span]], *, input_tokens: int) -> ExtractAnswer:
    """The answer; `found` are the spans of all inputs, in the request's order."""
    data = [
        Extraction("extraction", index, [_entity(text, span) for span in spans])
        for index, (text, spans) in enumerate(zip(call.texts, found, strict=True))
    ]
    return ExtractAnswer("list", data, call.body.model, ExtractUsage(input_tokens, input_tokens))


def _entity(text: str, span: Span) -> Entity:
    return Entity(span.start, span.end, text[span.start : span.end], span.label, span.score)


def _check_labels(labels: Sequence[str] | None) -> None:
    if labels is None:
        return
    if not 1 <= len(labels) <= LABELS_MAX:
        raise InvalidRequest(
            f"'labels' has {len(labels)} labels; send between 1 and {LABELS_MAX}, or none of the field for all",
            param="labels",
        )
    for index, label in enumerate(labels):
        if not 1 <= len(label) <= LABEL_CHARS_MAX:
            raise InvalidRequest(
                f"'labels[{index}]' has {len(label)} characters; it must have between 1 and {LABEL_CHARS_MAX}",
                param=f"labels[{index}]",
            )


def _texts(value: str | list[str]) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value)
    if not 1 <= len(texts) <= INPUTS_MAX:
        raise InvalidRequest(f"'input' has {len(texts)} texts; send between 1 and {INPUTS_MAX}", param="input")
    for index, text in enumerate(texts):
        if not text:
            name = "input" if isinstance(value, str) else f"input[{index}]"
            raise InvalidRequest(f"'{name}' is an empty text", param=name)
    return texts
