"""The msgpack client of docs/compat.md, as it stands there."""

import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tests.appliance_process import ApplianceProcess
from tests.e2e.conftest import ALIAS

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "compat.md"


def test_the_example_gets_the_vectors_that_json_gets(running: ApplianceProcess) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(example, str(PAGE), "exec"), names)
    texts = ["one text", "another"]

    vectors = names["embed"](texts, model=ALIAS, base_url=running.base_url, key="any")

    answer = httpx.post(f"{running.base_url}/embeddings", json={"model": ALIAS, "input": texts}).json()
    assert np.array_equal(vectors, np.array([one["embedding"] for one in answer["data"]], dtype="<f4"))
