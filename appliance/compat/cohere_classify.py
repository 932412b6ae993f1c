"""`POST /v1/classify` in Cohere's dialect: by a model with labels of its own, or by labelled examples."""

import uuid
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np
import numpy.typing as npt

from appliance.compat.bodies import BodyDecoder
from appliance.compat.cohere_inputs import TRUNCATIONS, Truncate, checked
from appliance.compat.cohere_meta import BilledUnits, Meta, meta
from appliance.compat.formats import Format
from appliance.errors import InvalidRequest, UnsupportedParameter
from appliance.jobs import Truncation

EXAMPLES_MAX = 2500
EXAMPLES_PER_LABEL_MIN = 2
LABELS_MIN = 2
PROBABLE = 0.5  # from here on a label that excludes no other is predicted

ClassificationType = Literal["single-label", "multi-label"]
Confidences = npt.NDArray[np.float64]


class Example(msgspec.Struct, frozen=True):
    """A text and its label."""

    text: str | None = None
    label: str | None = None


class ClassifyBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields Cohere documents."""

    inputs: list[str]
    examples: list[Example] | None = None
    model: str | None = None
    preset: str | None = None
    truncate: Truncate | None = None


class ClassifyCall(msgspec.Struct, frozen=True):
    """A checked request. `example_labels` are indices into `labels`, one for each of `example_texts`."""

    model: str | None  # None: the default one
    inputs: tuple[str, ...]
    example_texts: tuple[str, ...]
    example_labels: tuple[int, ...]
    labels: tuple[str, ...]
    truncation: Truncation | None  # None: the client leaves it open
    ignored: tuple[str, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """All texts: the examples, then the inputs."""
        return self.example_texts + self.inputs

    def name_of(self, index: int) -> str:
        """The client's name of one of `texts`."""
        count = len(self.example_texts)
        return f"examples[{index}].text" if index < count else f"inputs[{index - count}]"


class LabelConfidence(msgspec.Struct, frozen=True):
    """How probable a label is."""

    confidence: float


class Classification(msgspec.Struct, frozen=True):
    """One input's. Only where labels exclude each other is one of them `prediction`."""

    id: str
    input: str
    prediction: str | None
    predictions: list[str]
    confidence: float | None
    confidences: list[float]
    labels: dict[str, LabelConfidence]
    classification_type: ClassificationType


class ClassifyAnswer(msgspec.Struct, frozen=True):
    """One classification an input, in their order."""

    id: str
    classifications: list[Classification]
    meta: Meta


_bodies = BodyDecoder(ClassifyBody)


def decode(body: bytes, form: Format = "json") -> ClassifyCall:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body, form)
    if fields.preset is not None:
        raise UnsupportedParameter(
            "'preset' is not served; send `model`, and `examples` if it needs them", param="preset"
        )
    examples = [_checked(example, index) for index, example in enumerate(fields.examples or ())]
    labels = _labels([label for _, label in examples])
    return ClassifyCall(
        model=fields.model,
        inputs=checked(fields.inputs, field="inputs"),
        example_texts=tuple(text for text, _ in examples),
        example_labels=tuple(labels[label] for _, label in examples),
        labels=tuple(labels),
        truncation=TRUNCATIONS[fields.truncate] if fields.truncate else None,
        ignored=ignored,
    )


def answer(
    inputs: Sequence[str], names: Sequence[str], confidences: Confidences, *, are_independent: bool
) -> ClassifyAnswer:
    """The answer. `confidences` is [inputs, names]; independent ones do not exclude each other."""
    classify = _independent if are_independent else _exclusive
    found = [classify(text, names, row.tolist()) for text, row in zip(inputs, confidences, strict=True)]
    return ClassifyAnswer(str(uuid.uuid4()), found, meta("1", BilledUnits(classifications=len(inputs))))


def _checked(example: Example, index: int) -> tuple[str, str]:
    if not example.text:
        raise InvalidRequest(f"'examples[{index}].text' is missing or empty", param=f"examples[{index}].text")
    if not example.label:
        raise InvalidRequest(f"'examples[{index}].label' is missing or empty", param=f"examples[{index}].label")
    return example.text, example.label


def _labels(of_examples: Sequence[str]) -> dict[str, int]:
    """Each label and its index, by first appearance."""
    if len(of_examples) > EXAMPLES_MAX:
        raise InvalidRequest(
            f"'examples' has {len(of_examples)} examples, the limit is {EXAMPLES_MAX}; send fewer", param="examples"
        )
    counts = Counter(of_examples)
    if counts and len(counts) < LABELS_MIN:
        raise InvalidRequest(
            f"'examples' has one label; send examples of {LABELS_MIN} or more labels", param="examples"
        )
    for label, count in counts.items():
        if count < EXAMPLES_PER_LABEL_MIN:
            raise InvalidRequest(
                f"'examples' has one example of the label '{label[:100]}'; each label needs "
                f"{EXAMPLES_PER_LABEL_MIN} or more",
                param="examples",
            )
    return {label: index for index, label in enumerate(counts)}


def _exclusive(text: str, names: Sequence[str], confidences: list[float]) -> Classification:
    best = max(range(len(names)), key=confidences.__getitem__)
    return Classification(
        id=str(uuid.uuid4()),
        input=text,
        prediction=names[best],
        predictions=[names[best]],
        confidence=confidences[best],
        confidences=[confidences[best]],
        labels=_by_name(names, confidences),
        classification_type="single-label",
    )


def _independent(text: str, names: Sequence[str], confidences: list[float]) -> Classification:
    order = sorted(range(len(names)), key=confidences.__getitem__, reverse=True)
    probable = [index for index in order if confidences[index] >= PROBABLE]
    return Classification(
        id=str(uuid.uuid4()),
        input=text,
        prediction=None,
        predictions=[names[index] for index in probable],
        confidence=None,
        confidences=[confidences[index] for index in probable],
        labels=_by_name(names, confidences),
        classification_type="multi-label",
    )


def _by_name(names: Sequence[str], confidences: Sequence[float]) -> dict[str, LabelConfidence]:
    return {name: LabelConfidence(confidence) for name, confidence in zip(names, confidences, strict=True)}
