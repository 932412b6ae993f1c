"""An answer is of its task's kind, count and width, or it is a fault."""

import pytest

from appliance.gateway.shapes import fault
from appliance.jobs import Classify, Embed, Extract, Labels, Part, Rerank, Rows, Scores, Span, Spans, Task

TWO = ("a", "b")
EMBED, RERANK, CLASSIFY, EXTRACT = Embed(TWO), Rerank("q", TWO), Classify(TWO), Extract(TWO)


def floats(count: int) -> bytes:
    return b"\0" * 4 * count


GOOD: list[tuple[Task, list[Part]]] = [
    (EMBED, [Rows(floats(6), 3)]),
    (EMBED, [Rows(floats(3), 3), Rows(floats(3), 3)]),
    (Embed(TWO, width=3), [Rows(floats(6), 3)]),
    (RERANK, [Scores(floats(2))]),
    (RERANK, [Scores(floats(1)), Scores(floats(1))]),
    (CLASSIFY, [Labels(("x", "y", "z"), floats(6))]),
    (CLASSIFY, [Labels(("x",), floats(1)), Labels(("x",), floats(1))]),
    (EXTRACT, [Spans(((), (Span(0, 1, "PER", 0.5),)))]),
    (EXTRACT, [Spans(((),)), Spans(((),))]),
]


@pytest.mark.parametrize(("task", "parts"), GOOD)
def test_a_whole_answer_passes(task: Task, parts: list[Part]) -> None:
    assert fault(parts, task=task) == ""


@pytest.mark.parametrize(
    ("task", "parts"),
    [
        (EMBED, []),
        (EMBED, [Rows(floats(3), 3)]),
        (EMBED, [Rows(floats(9), 3)]),
        (EMBED, [Rows(floats(6), 0)]),
        (EMBED, [Rows(floats(6), -3)]),
        (EMBED, [Rows(floats(1), 3), Rows(floats(5), 3)]),
        (EMBED, [Rows(floats(3), 3), Rows(floats(2), 2)]),
        (Embed(TWO, width=2), [Rows(floats(6), 3)]),
        (RERANK, []),
        (RERANK, [Scores(floats(3))]),
        (RERANK, [Scores(floats(2)[:-1])]),
        (CLASSIFY, []),
        (CLASSIFY, [Labels((), b"")]),
        (CLASSIFY, [Labels(("x", "y"), floats(3))]),
        (CLASSIFY, [Labels(("x",), floats(1)), Labels(("y",), floats(1))]),
        (EXTRACT, []),
        (EXTRACT, [Spans(((),))]),
    ],
)
def test_anything_else_is_a_fault_in_words(task: Task, parts: list[Part]) -> None:
    assert fault(parts, task=task)


KINDS: dict[type[Task], type[Part]] = {Embed: Rows, Rerank: Scores, Classify: Labels, Extract: Spans}
MIXED = [(task, parts) for task, _ in GOOD for _, parts in GOOD if not isinstance(parts[0], KINDS[type(task)])]


@pytest.mark.parametrize(("task", "parts"), MIXED)
def test_another_tasks_answer_is_a_fault(task: Task, parts: list[Part]) -> None:
    assert fault(parts, task=task)
