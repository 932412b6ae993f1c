"""The README's calls are run as they stand, and their output is the real one."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.appliance_process import ApplianceProcess

pytestmark = pytest.mark.slow

README = Path(__file__).parents[2] / "README.md"
CALL = re.compile(r"```python\n(?P<code>.*?)```\s*```text\n(?P<output>.*?)```", re.DOTALL)


def test_the_calls_print_what_the_readme_says(running: ApplianceProcess) -> None:
    found = list(CALL.finditer(README.read_text()))
    assert len(found) == 2
    code = "".join(call["code"] for call in found).replace("http://127.0.0.1:8080/v1", running.base_url)
    assert running.base_url in code

    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert run.stdout == "".join(call["output"] for call in found)
