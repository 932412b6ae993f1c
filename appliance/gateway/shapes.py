"""The last look at an answer before a client sees it: its kind, count, width and order. Pure."""

from collections.abc import Sequence
from typing import assert_never, cast

from appliance.jobs import (
    Classify,
    Decide,
    Delta,
    Detokenize,
    Embed,
    Extract,
    Generate,
    Labels,
    Output,
    Part,
    Rerank,
    Rows,
    Scores,
    Spans,
    SparseRows,
    Task,
    Text,
    Tokenize,
    Tokenized,
    TokenRows,
    Weights,
)

FLOAT_BYTES = 4
KINDS: dict[Output, type[Part]] = {"dense": Rows, "multivector": TokenRows, "sparse": SparseRows}


def fault(parts: Sequence[Part], *, task: Task) -> str:  # noqa: PLR0911  # a table
    """What is wrong with the parts of an answer to `task`, or "" when nothing is."""
    match task:
        case Embed() as embed:
            return _embed_fault(parts, embed)
        case Rerank(documents=documents):
            scores = [part for part in parts if isinstance(part, Scores)]
            size = sum(len(part.data) for part in scores)
            return _other_kinds(parts, scores) or _size_fault(size, count=len(documents), width=1, what="scores")
        case Classify(inputs=inputs):
            labels = [part for part in parts if isinstance(part, Labels)]
            return _other_kinds(parts, labels) or _labels_fault(labels, count=len(inputs))
        case Extract(inputs=inputs):
            spans = [part for part in parts if isinstance(part, Spans)]
            found = sum(len(part.inputs) for part in spans)
            wrong_count = "" if found == len(inputs) else f"{len(inputs)} inputs came back as {found}"
            return _other_kinds(parts, spans) or wrong_count
        case Tokenize():
            return "" if len(parts) == 1 and isinstance(parts[0], Tokenized) else "the tokens of the text did not come"
        case Detokenize():
            return "" if len(parts) == 1 and isinstance(parts[0], Text) else "the text of the tokens did not come"
        case Generate():
            return "" if all(isinstance(part, Delta) for part in parts) else "the answer is of another kind than a text"
        case Decide(questions=questions):
            weights = [part for part in parts if isinstance(part, Weights)]
            sizes = [len(row) for part in weights for row in part.questions]
            wanted = [FLOAT_BYTES * max(1, len(question.options)) for question in questions]
            return _other_kinds(parts, weights) or ("" if sizes == wanted else "questions came back as others")
        case _:
            assert_never(task)


def _embed_fault(parts: Sequence[Part], task: Embed) -> str:
    count = len(task.inputs) or len(task.ids)
    known = 0
    for output in task.outputs:
        kind = KINDS[output]
        found = [part for part in parts if type(part) is kind]
        if words := _output_fault(found, count=count, asked=task.width):
            return words
        known += len(found)
    return "" if known == len(parts) else "the answer is of another kind than the task"


def _output_fault(parts: Sequence[Part], *, count: int, asked: int | None) -> str:
    """Of the parts of one output, which are of one kind."""
    found = 0
    for part in parts:
        match part:
            case Rows():
                return _rows_fault(cast("Sequence[Rows]", parts), count=count, asked=asked)
            case TokenRows(inputs=rows, width=width):
                if width <= 0 or any(not row or len(row) % (FLOAT_BYTES * width) for row in rows):
                    return "vectors of tokens came back cut within a vector"
                found += len(rows)
            case SparseRows(inputs=weights):
                if any(len(row.indices) != len(row.values) or len(row.values) % FLOAT_BYTES for row in weights):
                    return "sparse vectors came back with indices and weights of different numbers"
                found += len(weights)
    return "" if found == count else f"{count} inputs came back as {found}"


def _rows_fault(rows: Sequence[Rows], *, count: int, asked: int | None) -> str:
    width = rows[0].width
    if asked is not None and width != asked:
        return f"vectors of width {asked} were asked for and came back with width {width}"
    size = 0
    for part in rows:
        if part.width != width:
            return f"vectors of widths {width} and {part.width} came in one answer"
        if width <= 0 or len(part.data) % (FLOAT_BYTES * width):
            return f"vectors of width {width} came back cut within a vector"
        size += len(part.data)
    return _size_fault(size, count=count, width=width, what="vectors")


def _labels_fault(labels: Sequence[Labels], *, count: int) -> str:
    if len({part.names for part in labels}) != 1 or not labels[0].names:
        return "different labels came in one answer"
    size = sum(len(part.data) for part in labels)
    return _size_fault(size, count=count, width=len(labels[0].names), what="probabilities")


def _size_fault(size: int, *, count: int, width: int, what: str) -> str:
    return (
        "" if size == FLOAT_BYTES * width * count else f"{count} inputs came back as {size} B of {what}, {width} each"
    )


def _other_kinds(parts: Sequence[Part], wanted: Sequence[Part]) -> str:
    return "" if len(parts) == len(wanted) else "the answer is of another kind than the task"
