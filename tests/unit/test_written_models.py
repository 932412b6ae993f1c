"""What a worker makes of the settings of a model that writes."""

import logging
from pathlib import Path

import msgspec
import pytest

from appliance.cli.worker import WITHOUT_SGLANG, writes, written_model
from appliance.errors import StartupError
from appliance.presets import Preset, load_preset, shipped_presets_dir
from appliance.settings import ModelSettings, Settings
from tests.tiny_writers import save_writer

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("writer")
    save_writer(path)
    return path


def model_of(folder: Path, **fields: object) -> ModelSettings:
    table = {"name": "m", "folder": str(folder), "facts": {"tasks": ["generate"]}} | fields
    return msgspec.convert(table, ModelSettings)


def preset_of(model: ModelSettings, hardware: str = "cpu") -> Preset:
    return load_preset(model, hardware=hardware, presets_dirs=[shipped_presets_dir()])


def test_a_model_that_generates_does_nothing_else(folder: Path) -> None:
    model = model_of(folder, facts={"tasks": ["generate", "embed"]})

    with pytest.raises(StartupError, match=r'\["generate"\]'):
        writes(preset_of(model))
    assert writes(preset_of(model_of(folder)))
    assert not writes(preset_of(model_of(folder, facts={"tasks": ["embed"]})))


def test_the_preset_bounds_a_prompt_and_its_text_and_so_does_the_model(folder: Path, tmp_path: Path) -> None:
    settings = Settings(state_dir=str(tmp_path))
    short = {"generation": {"runtime": "embedded", "sequences_max": 2, "sequence_tokens_max": 100}}
    models = [model_of(folder), model_of(folder, tuning=short)]

    found = [written_model(preset_of(model), model, settings) for model in models]

    assert [one.writer.tokens_max for one in found] == [512, 100]


def test_without_sglang_a_gpus_preset_falls_back(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(folder)
    with caplog.at_level(logging.WARNING):
        found = written_model(preset_of(model, "gpu"), model, Settings(state_dir=str(tmp_path)))

    assert found.preset.tuning.generation == WITHOUT_SGLANG
    assert "appliance engines install sglang" in caplog.text


def test_who_asks_for_sglang_is_told_that_it_is_missing(folder: Path, tmp_path: Path) -> None:
    wanted = {"generation": {"runtime": "sglang", "sequences_max": 2, "sequence_tokens_max": 100}}
    model = model_of(folder, tuning=wanted)

    with pytest.raises(StartupError, match="appliance engines install"):
        written_model(preset_of(model), model, Settings(state_dir=str(tmp_path)))
