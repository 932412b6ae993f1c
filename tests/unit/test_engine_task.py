"""Which tasks of a model one engine serves, and as what it is loaded."""

from typing import Literal

import pytest

from appliance.errors import StartupError
from appliance.presets import Facts, TaskName
from appliance.workers.engine_task import engine_task

RerankBy = Literal["", "similarity", "maxsim"]
Tasks = tuple[TaskName, ...]


@pytest.mark.parametrize(
    ("tasks", "rerank_by"),
    [
        (("embed", "rerank"), ""),
        (("rerank",), "similarity"),
        (("embed", "classify"), ""),
        (("generate", "embed"), ""),
        (("generate", "rerank"), ""),
        (("embed", "rerank", "generate"), "maxsim"),
    ],
)
def test_tasks_that_no_engine_serves_together_stop_the_start(tasks: Tasks, rerank_by: RerankBy) -> None:
    with pytest.raises(StartupError, match=r"\bm\b"):
        engine_task(Facts("m", tasks=tasks, rerank_by=rerank_by))


@pytest.mark.parametrize(
    ("tasks", "rerank_by", "expected"),
    [
        (("embed",), "", "embed"),
        (("embed", "rerank"), "maxsim", "embed"),
        (("rerank", "classify"), "", "score"),
        (("extract",), "", "tag"),
        (("generate",), "", "generate"),
    ],
)
def test_a_model_is_loaded_for_what_its_tasks_have_in_common(tasks: Tasks, rerank_by: RerankBy, expected: str) -> None:
    assert engine_task(Facts("m", tasks=tasks, rerank_by=rerank_by)) == expected


@pytest.mark.parametrize("tasks", [("embed",), ("extract", "embed"), ("generate",)])
def test_a_spacy_model_only_extracts(tasks: Tasks) -> None:
    with pytest.raises(StartupError, match="a spaCy model serves"):
        engine_task(Facts("m", tasks=tasks, runtime="spacy"))
    assert engine_task(Facts("m", tasks=("extract",), runtime="spacy")) == "parse"
