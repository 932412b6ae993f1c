"""Presets: layers, fallbacks, strictness, and the shipped files."""

import re
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import StartupError
from appliance.hardware import CPU_CLASSES, GPU_CLASSES
from appliance.presets import (
    GenerationTuning,
    Preset,
    fallbacks,
    folder_name,
    load_facts,
    load_preset,
    presets_dirs,
    shipped_presets_dir,
)
from appliance.settings import ModelSettings
from appliance.tables import read_toml

SHIPPED = shipped_presets_dir()
MODELS = [
    str(read_toml(path / "model.toml")["name"]) for path in sorted(SHIPPED.iterdir()) if (path / "model.toml").exists()
]
MINILM = "sentence-transformers/all-MiniLM-L6-v2"
TUNING = """
dtype = "float32"
batch_tokens_max = 64
batch_items_max = 8
batch_ms_max = 100.0
max_wait_ms = 0.0
handoff_ms = 1.0
batches_ahead = 2
backlog_batches = 2.0
length_bands = [32, 64]
engine_threads = 1
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A presets directory with defaults and one model, org/m."""
    for folder in ("default", "org--m"):
        (tmp_path / folder).mkdir()
    (tmp_path / "default/cpu.toml").write_text(TUNING)
    (tmp_path / "default/cpu-amx.toml").write_text(TUNING.replace("float32", "bfloat16"))
    (tmp_path / "default/gpu.toml").write_text(TUNING.replace("float32", "float16"))
    (tmp_path / "org--m/model.toml").write_text('name = "org/m"\nwidth = 4\naliases = ["m"]\nrevision = "abc"')
    return tmp_path


def preset_of(directory: Path, *, hardware: str = "cpu", name: str = "org/m") -> Preset:
    return load_preset(ModelSettings(name=name), hardware=hardware, presets_dirs=[directory])


@pytest.mark.parametrize("hardware", [*CPU_CLASSES, *GPU_CLASSES])
@pytest.mark.parametrize("model", [*MODELS, "someone/unknown"])
def test_every_shipped_preset_loads_for_every_class(model: str, hardware: str) -> None:
    preset = load_preset(ModelSettings(name=model), hardware=hardware, presets_dirs=presets_dirs(""))

    assert preset.facts.name == model
    assert preset.hardware == hardware
    if hardware in GPU_CLASSES:
        assert preset.tuning.evidence.provenance == "default"


def test_shipped_files_are_complete_and_honest() -> None:
    assert "sentence-transformers/all-MiniLM-L6-v2" in MODELS
    for model in MODELS:
        facts = load_facts(ModelSettings(name=model), presets_dirs=[SHIPPED])
        assert facts.licence
        own = facts.package.gguf if facts.package else ""
        assert (own or {"transformers": "model.safetensors", "spacy": "ner/model"}[facts.runtime]) in facts.sha256
        assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in facts.sha256.values())
        for hardware in CPU_CLASSES:
            evidence = load_preset(ModelSettings(name=model), hardware=hardware, presets_dirs=[SHIPPED]).tuning.evidence
            assert evidence.note
            assert evidence.provenance != "measured" or (evidence.date and evidence.tool)


def test_all_minilm_is_bfloat16_only_where_the_cpu_has_it() -> None:
    dtypes = {kind: preset_of(SHIPPED, hardware=kind, name=MODELS[0]).tuning.dtype for kind in CPU_CLASSES}

    assert dtypes == {"cpu": "float32", "cpu-amx": "bfloat16"}


def test_the_models_tuning_is_laid_over_the_default(mine: Path) -> None:
    (mine / "org--m/cpu.toml").write_text('batch_tokens_max = 128\n[evidence]\nprovenance = "measured"')

    tuning = preset_of(mine).tuning

    assert (tuning.batch_tokens_max, tuning.batch_items_max, tuning.evidence.provenance) == (128, 8, "measured")


@pytest.mark.parametrize(
    ("hardware", "expected"),
    [("cpu", ("cpu",)), ("cpu-amx", ("cpu-amx", "cpu")), ("l4", ("l4", "gpu")), ("gpu", ("gpu",))],
)
def test_classes_fall_back_to_the_general_one(hardware: str, expected: tuple[str, ...]) -> None:
    assert fallbacks(hardware) == expected


def test_tuning_taken_over_from_another_class_is_not_called_measured(mine: Path) -> None:
    (mine / "org--m/cpu.toml").write_text('batch_tokens_max = 128\n[evidence]\nprovenance = "measured"')

    tuning = preset_of(mine, hardware="cpu-amx").tuning

    assert (tuning.dtype, tuning.batch_tokens_max) == ("bfloat16", 128)
    assert tuning.evidence.provenance == "default"
    assert "taken over from cpu" in tuning.evidence.note


def test_the_users_overrides_win_and_take_the_evidence_with_them(mine: Path) -> None:
    (mine / "org--m/cpu.toml").write_text('batch_tokens_max = 128\n[evidence]\nprovenance = "measured"')
    model = ModelSettings(
        name="org/m", revision="def", aliases=(), facts={"width": 8}, tuning={"batch_tokens_max": 256}
    )

    preset = load_preset(model, hardware="cpu", presets_dirs=[mine])

    assert (preset.facts.width, preset.facts.revision, preset.facts.aliases) == (8, "def", ())
    assert preset.tuning.batch_tokens_max == 256
    assert preset.tuning.evidence.provenance == "default"
    assert "batch_tokens_max" in preset.tuning.evidence.note


GENERATION = """
[generation]
runtime = "sglang"
sequences_max = 64
sequence_tokens_max = 32768
flags = { mem-fraction-static = 0.6, chunked-prefill-size = 4096 }
"""


def generation_of(directory: Path, **override: object) -> GenerationTuning | None:
    model = ModelSettings(name="org/m", tuning={"generation": override} if override else {})
    return load_preset(model, hardware="cpu", presets_dirs=[directory]).tuning.generation


def test_how_texts_are_written_is_overridden_key_by_key_and_so_are_its_flags(mine: Path) -> None:
    (mine / "default/cpu.toml").write_text(TUNING + GENERATION)
    (mine / "org--m/cpu.toml").write_text("[generation]\nsequences_max = 32")
    flags: dict[str, str | int | float | bool] = {"mem-fraction-static": 0.6, "chunked-prefill-size": 4096}

    assert generation_of(mine) == GenerationTuning("sglang", 32, 32768, flags)
    assert generation_of(mine, sequence_tokens_max=100) == GenerationTuning("sglang", 32, 100, flags)
    assert generation_of(mine, flags={"mem-fraction-static": 0.5, "tp-size": 2}) == GenerationTuning(
        "sglang", 32, 32768, {"mem-fraction-static": 0.5, "chunked-prefill-size": 4096, "tp-size": 2}
    )
    assert generation_of(mine, runtime="sglang", sequences_max=8) == GenerationTuning("sglang", 8, 32768, flags)


def test_another_runtime_brings_all_of_its_own_numbers(mine: Path) -> None:
    (mine / "default/cpu.toml").write_text(TUNING + GENERATION)

    whole = generation_of(mine, runtime="embedded", sequences_max=2, sequence_tokens_max=64)

    assert whole == GenerationTuning("embedded", 2, 64)
    with pytest.raises(StartupError, match="generation lacks the key sequences_max"):
        generation_of(mine, runtime="embedded")
    with pytest.raises(StartupError, match=r"unknown key generation\.sequence_max;"):
        generation_of(mine, sequence_max=2)


def test_a_generation_without_one_below_it_is_whole(mine: Path) -> None:
    assert generation_of(mine) is None
    with pytest.raises(StartupError, match='the tuning of "org/m" on cpu: generation lacks the key runtime'):
        generation_of(mine, sequences_max=2)


def test_costs_are_replaced_whole_since_they_were_fitted_together(mine: Path) -> None:
    (mine / "default/cpu.toml").write_text(
        TUNING + "[cost]\nbatch_ms = 1.0\ntoken_ms = 1.0\nsquare_ms = 1.0\nitem_ms = 1.0"
    )
    (mine / "org--m/cpu.toml").write_text("[cost]\ntoken_ms = 2.0")

    with pytest.raises(StartupError, match="cost lacks the key batch_ms"):
        preset_of(mine)


def test_a_model_without_a_preset_has_default_facts(mine: Path) -> None:
    preset = preset_of(mine, name="my-own")

    assert (preset.facts.name, preset.facts.tasks, preset.facts.width) == ("my-own", ("embed",), None)


def test_the_first_directory_that_has_a_file_provides_it(mine: Path) -> None:
    facts = load_facts(ModelSettings(name="org/m"), presets_dirs=[mine, SHIPPED])
    tuning = load_preset(ModelSettings(name=MINILM), hardware="cpu", presets_dirs=[mine, SHIPPED]).tuning

    assert facts.width == 4
    assert (tuning.batch_tokens_max, presets_dirs(str(mine))) == (2048, (mine, SHIPPED))


@pytest.mark.parametrize(
    ("file", "text", "parts"),
    [
        ("org--m/model.toml", 'name = "org/m"\nwidht = 4', ["model.toml", "unknown key widht", '"width"']),
        ("org--m/model.toml", 'name = "other"', ["model.toml", "'other'", "'org/m'"]),
        ("org--m/model.toml", 'name = "org/m"\nwidth = "4"', ["model.toml", "width is '4'", "whole number"]),
        ("org--m/model.toml", 'name = "org/m"\n[prompts]\nquerry = ""', ["prompts.querry", '"query"']),
        ("org--m/model.toml", 'name = "org/m"\n[package]\nmodule = ""', ["package lacks the key"]),
        ("org--m/model.toml", 'name = "org/m"\n[sha256]\nx = 1', ["sha256 is", "a table, each value a text"]),
        ("org--m/cpu.toml", 'dtype = "int8"', ["cpu.toml", "dtype is 'int8'", '"bfloat16"']),
        ("org--m/cpu.toml", "batches_ahead = 0", ["cpu.toml", "batches_ahead is 0", "from 1 to 8"]),
        ("org--m/cpu.toml", '[evidence]\nprovenance = "guessed"', ["evidence.provenance", '"measured"']),
        ("default/cpu.toml", 'dtype = "float32"', ["lacks the key batch_tokens_max"]),
        ("default/cpu.toml", "dtype", ["cpu.toml is not valid TOML", "line 1"]),
    ],
)
def test_what_does_not_fit_is_named_with_its_file(mine: Path, file: str, text: str, parts: list[str]) -> None:
    (mine / file).write_text(text)

    with pytest.raises(StartupError) as caught:
        preset_of(mine)

    assert [part for part in parts if part not in caught.value.message] == []


@pytest.mark.parametrize(
    "model",
    [
        ModelSettings(name="org/m", facts={"nme": "x"}),
        ModelSettings(name="org/m", facts={"name": "x"}),
        ModelSettings(name="org/m", tuning={"batch_tokens": 5}),
        ModelSettings(name="org/m", tuning={"batch_tokens_max": "5"}),
    ],
)
def test_overrides_that_do_not_fit_are_named(mine: Path, model: ModelSettings) -> None:
    with pytest.raises(StartupError, match=r'models "org/m", (facts|tuning)'):
        load_preset(model, hardware="cpu", presets_dirs=[mine])


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "/etc", "a\\b", "a b", ".hidden", "x" * 201, "a\0b", "--", "~x"]
)
def test_names_that_are_no_folder_are_refused(name: str) -> None:
    with pytest.raises(StartupError):
        folder_name(name)


@hypothesis.settings(deadline=None)  # not a test of speed
@given(st.text(max_size=30))
def test_no_name_leaves_the_presets_directory(name: str) -> None:
    try:
        folder = folder_name(name)
    except StartupError:
        return
    assert Path("/presets", folder).resolve().parent == Path("/presets")


def test_a_presets_dir_that_is_not_there_is_refused() -> None:
    with pytest.raises(StartupError, match="presets_dir"):
        presets_dirs("/nowhere/at/all")
