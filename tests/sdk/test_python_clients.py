"""The vendors' Python clients, each line in an environment of its own, against a running appliance."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.sdk.installed import FOLDER, Unavailable, python_environment

pytestmark = pytest.mark.slow

RUN_S = 300.0
CLIENTS = {
    "openai2": (
        "openai",
        "openai_chat",
        "cohere",
        "cohere_chat",
        "langchain",
        "langchain_cohere",
        "llamaindex",
        "llamaindex_cohere",
        "haystack_cohere",
    ),
    "openai3": (
        "openai",
        "openai_chat",
        "cohere",
        "cohere_chat",
        "langchain",
        "langchain_chat",
        "llamaindex",
        "haystack",
        "litellm",
        "migration",
    ),
    "agents": ("agents", "pydantic_ai"),
    "instructor": ("instructor",),
}


@pytest.mark.parametrize(
    ("environment", "client"), [(environment, client) for environment, names in CLIENTS.items() for client in names]
)
def test_client(environment: str, client: str, surroundings: Mapping[str, str], tmp_path: Path) -> None:
    try:
        python = python_environment(environment)
    except Unavailable as missing:
        pytest.skip(str(missing))

    result = subprocess.run(
        [python, "-m", "pytest", "-c", FOLDER / "python" / "pytest.ini", FOLDER / "python" / f"test_{client}.py"],
        env={**quiet(python), **surroundings, "HOME": str(tmp_path), "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_S,
        check=False,
    )

    print(result.stdout)
    assert result.returncode == 0, f"{client} in {environment}: see its own report above"


def test_every_file_of_clients_tests_is_run() -> None:
    run = {client for names in CLIENTS.values() for client in names}
    assert run == {path.stem.removeprefix("test_") for path in (FOLDER / "python").glob("test_*.py")}


def quiet(python: Path) -> dict[str, str]:
    """What keeps the clients from the network beyond the appliance: they look for prices, vocabularies, and report."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    return {
        "TIKTOKEN_CACHE_DIR": str(packages / "llama_index" / "core" / "_static" / "tiktoken_cache"),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HAYSTACK_TELEMETRY_ENABLED": "False",
        "LANGSMITH_TRACING": "false",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "",
        "TOKENIZERS_PARALLELISM": "false",
    }
