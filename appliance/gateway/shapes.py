"""The last look at an answer before a client sees it: its kind, count, width and order. Pure."""

from collections.abc import Sequence
from typing import assert_never

from appliance.jobs import (
    Classify,
    Detokenize,
    Embed,
    Extract,
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
)

FLOAT_BYTES = 4


def fault(parts: Sequence[Part], *, task: Task) -> str:
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
        case _:
            assert_never(task)


def _embed_fault(parts: Sequence[Part], task: Embed) -> str:
    count = len(task.inputs) or len(task.ids)
    by_output: dict[Output, list[Part]] = {output: [] for output in task.outputs}
    for part in parts:
        output = _output_of(part)
        if output not in by_output:
            return "the answer is of another kind than the task"
        by_output[output].append(part)
    faults = (_output_fault(found, count=count, asked=task.width) for found in by_output.values())
    return next(filter(None, faults), "")


def _output_of(part: Part) -> Output | None:
    match part:
        case Rows():
            return "dense"
        case TokenRows():
            return "multivector"
        case SparseRows():
            return "sparse"
        case _:
            return None


def _output_fault(parts: Sequence[Part], *, count: int, asked: int | None) -> str:
    """Of the parts of one output."""
    rows = [part for part in parts if isinstance(part, Rows)]
    if rows:
        return _rows_fault(rows, count=count, asked=asked)
    tokens = [part for part in parts if isinstance(part, TokenRows)]
    sparse = [part for part in parts if isinstance(part, SparseRows)]
    found = sum(len(part.inputs) for part in tokens) + sum(len(part.inputs) for part in sparse)
    if found != count:
        return f"{count} inputs came back as {found}"
    if any(not row or len(row) % (FLOAT_BYTES * part.width) for part in tokens for row in part.inputs):
        return "vectors of tokens came back cut within a vector"
    if any(len(row.indices) != len(row.values) or len(row.values) % FLOAT_BYTES for p in sparse for row in p.inputs):
        return "sparse vectors came back with indices and weights of different numbers"
    return ""


def _rows_fault(rows: Sequence[Rows], *, count: int, asked: int | None) -> str:
    widths = {part.width for part in rows}
    if len(widths) != 1:
        return f"vectors of {len(widths)} widths came in one answer"
    (width,) = widths
    if asked is not None and width != asked:
        return f"vectors of width {asked} were asked for and came back with width {width}"
    if width <= 0 or any(len(part.data) % (FLOAT_BYTES * width) for part in rows):
        return f"vectors of width {width} came back cut within a vector"
    return _size_fault(sum(len(part.data) for part in rows), count=count, width=width, what="vectors")


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
