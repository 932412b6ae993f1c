"""Texts whose numbers 16 bits cannot hold are computed again in float32 before they are called an error."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

import torch

from appliance.workers.engine import OutOfMemory
from appliance.workers.engines import encoder, golden
from appliance.workers.engines.encoder import EncoderEngine
from appliance.workers.tokenize import Tokenizer
from appliance.workers.tokens import packed
from appliance.workers.wire import Encode, Encoded, Load
from tests.tiny_models import save_classifier, save_family, spoil_weights, tiny_bert

pytestmark = pytest.mark.slow

WORDS = "embeddings.word_embeddings.weight"


@pytest.fixture
def large(tmp_path: Path) -> int:
    """A token of `tmp_path / "m"` whose numbers float16 cannot hold; the one after it is no number in any precision."""
    save_family(tmp_path / "m", tiny_bert, "mean")
    return spoiled(tmp_path / "m")


def spoiled(folder: Path) -> int:
    tokenizer = Tokenizer.load(folder)
    seen = {int(number) for text in tokenizer.encode(golden.TEXTS) for number in np.frombuffer(text.ids, "<i4")}

    def change(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith(WORDS):
            free = [number for number in range(5, len(tensor) - 1) if not {number, number + 1} & seen]
            found.append(free[0])
            tensor[free[0]] *= 1e6
            tensor[free[0] + 1] = float("nan")
        return tensor

    found: list[int] = []
    spoil_weights(folder, change)
    return found[0]


def encoded(engine: EncoderEngine, *texts: Sequence[int], per_token: tuple[int, ...] = ()) -> Encoded:
    ids = b"".join(map(packed, texts))
    return engine.encode(Encode(1, "m", ids, tuple(map(len, texts)), per_token=per_token))


def rows(found: Encoded) -> npt.NDArray[np.float32]:
    return np.frombuffer(found.rows, "<f4").reshape(-1, found.width)


def engine_of(folder: Path, dtype: str, task: str = "embed") -> EncoderEngine:
    engine = EncoderEngine()
    engine.load(Load("m", str(folder), dtype, "cpu", 1, task=task))
    return engine


def test_such_a_text_has_the_vector_of_float32_and_its_neighbours_their_own(tmp_path: Path, large: int) -> None:
    texts = ([2, 6, 3], [2, large, 7, 3], [2, 7, 3], [2, large + 1, 3], [2, large, 3])
    exact = rows(encoded(engine_of(tmp_path / "m", "float32"), *texts))

    found = encoded(engine_of(tmp_path / "m", "float16"), *texts)

    assert found.bad == (3,)
    good = [0, 1, 2, 4]
    assert (rows(found)[good] * exact[good]).sum(axis=1) == pytest.approx(1, abs=1e-3)
    assert rows(found)[[1, 4]] == pytest.approx(exact[[1, 4]], abs=1e-6)


def test_so_do_its_tokens(tmp_path: Path, large: int) -> None:
    texts = ([2, 6, 3], [2, large, 7, 3], [2, large, 3])
    exact = rows(encoded(engine_of(tmp_path / "m", "float32"), *texts, per_token=(1,)))

    found = encoded(engine_of(tmp_path / "m", "float16"), *texts, per_token=(1,))

    assert (found.bad, found.counts) == ((), (1, 4, 1))
    assert rows(found)[1:] == pytest.approx(exact[1:], abs=1e-6)


@pytest.mark.parametrize("task", ["score", "tag"])
def test_so_do_logits(tmp_path: Path, task: str) -> None:
    save_classifier(tmp_path / "m", "bert", task=task, labels=3)
    large = spoiled(tmp_path / "m")
    texts = ([2, 6, 3], [2, large, 7, 3], [2, large + 1, 3])
    exact = rows(encoded(engine_of(tmp_path / "m", "float32", task), *texts))

    found = encoded(engine_of(tmp_path / "m", "float16", task), *texts)

    assert found.bad == (2,)
    own = slice(3, 7) if task == "tag" else slice(1, 2)
    assert rows(found)[own] == pytest.approx(exact[own], abs=1e-5)


def test_the_copy_is_loaded_once(tmp_path: Path, large: int, caplog: pytest.LogCaptureFixture) -> None:
    engine = engine_of(tmp_path / "m", "float16")

    assert [encoded(engine, [2, large, 3]).bad for _ in range(3)] == [()] * 3
    assert sum("again in float32" in record.message for record in caplog.records) == 1


@pytest.mark.parametrize("error", [OutOfMemory("the machine is out of memory"), ValueError("no such file")])
def test_without_the_copy_the_text_alone_stays_bad(
    tmp_path: Path, large: int, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = engine_of(tmp_path / "m", "float16")
    tries = []

    def refuse(*_: object, **__: object) -> None:
        tries.append(1)
        raise error

    monkeypatch.setattr(encoder, "embedder_runner", refuse)

    assert [encoded(engine, [2, 6, 3], [2, large, 3]).bad for _ in range(2)] == [(1,)] * 2
    assert len(tries) == 1
