"""`POST /v1/decisions`, OpenAI's: questions about an input, answered by the probabilities of their options.

Body → `DecisionsCall` → one `Decide`; its `Weights` → answer. Bounds are OpenAI's documented ones, except that its
documents leave two things open:

- The levels of a score are numbered from 0, as LangChain's and other clients of it have them; there are 2 to 10.
- The confidence of an answer says how concentrated its distribution is, by a formula that is not published. Here it is
  1 - H(p) / ln n: Shannon's entropy of the n probabilities against that of n equal ones. 1 is certain, 0 no idea.
"""

from collections.abc import Sequence
from typing import Annotated

import msgspec
import numpy as np
from msgspec import Meta

from appliance.compat import items
from appliance.compat.bodies import BodyDecoder
from appliance.compat.formats import Format
from appliance.compat.items import Item, Part
from appliance.compat.json_bounds import JsonObject
from appliance.compat.response_usage import ResponseUsage
from appliance.errors import BadVector, InvalidRequest
from appliance.jobs import Decide, Question, Usage

NAMES = ((r"messages.*", "input"),)  # see `generation.Names`
QUESTIONS_MAX = 400
CHOICES_MIN, CHOICES_MAX = 2, 255
LEVELS_MIN, LEVELS_MAX = 2, 10
_SUM_ERROR_MAX = 0.01  # of probabilities, which are made in float32 from logits that may be of 16 bits

Instructions = str | list[Part]


class PredicateQuestion(msgspec.Struct, frozen=True, tag_field="type", tag="predicate"):
    """How likely is this statement to be true?"""

    instructions: Instructions
    name: str | None = None


class ChoiceOption(msgspec.Struct, frozen=True):
    """A value to choose; `true` and `"true"` are two."""

    value: str | bool
    description: str | None = None


class ChoiceQuestion(msgspec.Struct, frozen=True, tag_field="type", tag="choice"):
    """Which of these is it?"""

    instructions: Instructions
    # The bounds are said in the OpenAPI document only: `decode` refuses in words of its own.
    choices: Annotated[list[ChoiceOption], Meta(extra_json_schema={"minItems": CHOICES_MIN, "maxItems": CHOICES_MAX})]
    name: str | None = None


class ScoreLevel(msgspec.Struct, frozen=True):
    """A level of a scale."""

    label: str
    description: str | None = None


class ScoreQuestion(msgspec.Struct, frozen=True, tag_field="type", tag="score"):
    """Where on this scale is it?"""

    instructions: Instructions
    levels: Annotated[
        list[ScoreLevel], Meta(extra_json_schema={"minItems": LEVELS_MIN, "maxItems": LEVELS_MAX})
    ]  # lowest first
    name: str | None = None


AnyQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion


class DecisionsBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields that OpenAI documents. Explicit nulls mean absent."""

    model: str
    input: str | list[Item]
    questions: Annotated[list[AnyQuestion], Meta(extra_json_schema={"minItems": 1, "maxItems": QUESTIONS_MAX})]
    # Change nothing here.
    prompt_cache_key: str | None = None
    prompt_cache_options: JsonObject | None = None
    safety_identifier: str | None = None


class PredicateAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="predicate"):
    """The probability of its being true."""

    name: str | None
    probability: float


class ChoiceProbability(msgspec.Struct, frozen=True):
    """Of one choice."""

    value: str | bool
    probability: float


class ChoiceAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="choice"):
    """The most probable choice, and all in the order of the question."""

    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(msgspec.Struct, frozen=True):
    """Of one level; `value` is its number, from 0."""

    value: int
    label: str
    probability: float


class ScoreAnswer(msgspec.Struct, frozen=True, tag_field="type", tag="score"):
    """The expected level, which may lie between two, and all levels in their order."""

    name: str | None
    score: float
    confidence: float
    probabilities: list[LevelProbability]


class Decision(msgspec.Struct, frozen=True):
    """The answers, in the order of the questions."""

    model: str
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer]
    usage: ResponseUsage


class DecisionsCall(msgspec.Struct, frozen=True):
    """A checked request."""

    body: DecisionsBody
    messages: bytes  # a JSON array of chat messages
    questions: tuple[Question, ...]
    ignored: tuple[str, ...]

    @property
    def model(self) -> str:
        """As the client wrote it."""
        return self.body.model

    @property
    def task(self) -> Decide:
        """All questions in one."""
        return Decide(self.messages, self.questions)

    def answer(self, weights: Sequence[bytes], *, model: str, usage: Usage) -> Decision:
        """The answer. `weights` are those of all questions, in their order: float32, little-endian, see `jobs.Weights`.

        Raises BadVector for weights that are no probabilities of the options.
        """
        if len(weights) != len(self.body.questions):
            raise BadVector(f"{len(weights)} results for {len(self.body.questions)} questions")
        answers = [_answer(question, data) for question, data in zip(self.body.questions, weights, strict=True)]
        return Decision(model, answers, ResponseUsage.of(usage))


_bodies = BodyDecoder(DecisionsBody)


def decode(body: bytes, form: Format = "json") -> DecisionsCall:
    """Raises MalformedBody, InvalidRequest or UnsupportedParameter; `param` names the field at fault."""
    fields, ignored = _bodies.decode(body, form)
    _check_count(len(fields.questions), 1, QUESTIONS_MAX, "questions")
    return DecisionsCall(
        body=fields,
        messages=items.messages(fields.input, takes_json=True),
        questions=tuple(_question(asked, f"questions[{index}]") for index, asked in enumerate(fields.questions)),
        ignored=ignored,
    )


def _question(asked: AnyQuestion, name: str) -> Question:
    instructions = items.plain_text(asked.instructions, f"{name}.instructions")
    if not instructions.strip():
        raise InvalidRequest(f"'{name}.instructions' is an empty text", param=f"{name}.instructions")
    match asked:
        case PredicateQuestion():
            return Question("predicate", instructions)
        case ChoiceQuestion(choices=choices):
            return Question("choice", instructions, _choices(choices, f"{name}.choices"))
        case ScoreQuestion(levels=levels):
            return Question("score", instructions, _levels(levels, f"{name}.levels"))


def _choices(choices: Sequence[ChoiceOption], name: str) -> tuple[str, ...]:
    _check_count(len(choices), CHOICES_MIN, CHOICES_MAX, name)
    known: set[str | bool] = set()
    for index, choice in enumerate(choices):
        if choice.value in known:
            raise InvalidRequest(f"'{name}[{index}].value' was there before", param=f"{name}[{index}].value")
        known.add(choice.value)
    return tuple(
        _option(_shown(choice.value), choice.description, f"{name}[{index}].value")
        for index, choice in enumerate(choices)
    )


def _levels(levels: Sequence[ScoreLevel], name: str) -> tuple[str, ...]:
    _check_count(len(levels), LEVELS_MIN, LEVELS_MAX, name)
    return tuple(
        _option(level.label, level.description, f"{name}[{index}].label") for index, level in enumerate(levels)
    )


def _option(label: str, description: str | None, name: str) -> str:
    """What the model is shown of an option."""
    if not label.strip():
        raise InvalidRequest(f"'{name}' is an empty text", param=name)
    return f"{label}: {description}" if description else label


def _shown(value: str | bool) -> str:
    return value if isinstance(value, str) else str(value).lower()


def _check_count(count: int, least: int, most: int, name: str) -> None:
    if not least <= count <= most:
        raise InvalidRequest(f"'{name}' has {count} entries; send between {least} and {most}", param=name)


def _answer(asked: AnyQuestion, data: bytes) -> PredicateAnswer | ChoiceAnswer | ScoreAnswer:
    match asked:
        case PredicateQuestion(name=name):
            (probability,) = _numbers(data, 1)
            return PredicateAnswer(name, probability)
        case ChoiceQuestion(name=name, choices=choices):
            shares = _distribution(data, len(choices))
            return ChoiceAnswer(
                name,
                choices[int(np.argmax(shares))].value,
                _confidence(shares),
                [ChoiceProbability(choice.value, share) for choice, share in zip(choices, shares, strict=True)],
            )
        case ScoreQuestion(name=name, levels=levels):
            shares = _distribution(data, len(levels))
            return ScoreAnswer(
                name,
                sum(value * share for value, share in enumerate(shares)),
                _confidence(shares),
                [
                    LevelProbability(value, level.label, share)
                    for value, (level, share) in enumerate(zip(levels, shares, strict=True))
                ],
            )


def _numbers(data: bytes, count: int) -> list[float]:
    """Raises BadVector for anything but `count` numbers from 0 to 1."""
    numbers = np.frombuffer(data, "<f4") if len(data) == 4 * count else np.array([np.nan])
    if not bool(np.all((numbers >= 0) & (numbers <= 1))):  # false for what is not a number, too
        raise BadVector("a decision's weights are no probabilities of its options")
    return [float(number) for number in numbers]


def _distribution(data: bytes, count: int) -> list[float]:
    """Probabilities that sum to 1 as nearly as doubles can; raises BadVector where they are far from it."""
    shares = _numbers(data, count)
    whole = sum(shares)
    if abs(whole - 1) > _SUM_ERROR_MAX:
        raise BadVector("a decision's weights do not sum to 1")
    return [share / whole for share in shares]


def _confidence(shares: Sequence[float]) -> float:
    """How concentrated they are; see the module's words."""
    known = np.array([share for share in shares if share > 0])
    entropy = float(-(known * np.log(known)).sum())
    return min(max(1 - entropy / float(np.log(len(shares))), 0.0), 1.0)
