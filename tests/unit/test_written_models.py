"""What a worker makes of the settings of a model that writes."""

from pathlib import Path

import msgspec
import pytest

from appliance.cli.plan import plan_model
from appliance.cli.worker import written_model
from appliance.hardware import Hardware
from appliance.settings import ModelSettings, Settings
from tests.tiny_writers import save_writer

pytestmark = pytest.mark.slow

CPU = Hardware("cpu", ("cpu",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("writer")
    save_writer(path)
    return path


def model_of(folder: Path, **fields: object) -> ModelSettings:
    table = {"name": "m", "folder": str(folder), "facts": {"tasks": ["generate"]}} | fields
    return msgspec.convert(table, ModelSettings)


def test_the_preset_bounds_a_prompt_and_its_text_and_so_does_the_model(folder: Path, tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    models = [model_of(folder), model_of(folder, tuning={"generation": {"sequence_tokens_max": 100}})]

    found = [written_model(plan_model(model, settings, hardware=CPU), settings) for model in models]

    assert [one.writer.tokens_max for one in found] == [512, 100]
