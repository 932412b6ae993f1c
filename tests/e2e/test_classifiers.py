"""Cross-encoders and token classifiers against sentence-transformers' CrossEncoder and transformers' own logits."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from appliance.errors import InvalidRequest, TooLong
from appliance.workers.cutting import longest_first
from appliance.workers.tokenize import Tokenizer
from appliance.workers.tokens import Tokens
from appliance.workers.wire import Encode, Encoded, Load, Loaded

pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

import torch
import transformers
from sentence_transformers import CrossEncoder
from tokenizers import Tokenizer as RustTokenizer

from appliance.workers.engines import classification, golden
from appliance.workers.engines.classification import check_logits
from appliance.workers.engines.encoder import EncoderEngine
from appliance.workers.engines.label_card import label_card
from appliance.workers.engines.packing import finite
from tests.tiny_models import (
    CLASSIFIERS,
    SENTENCES,
    save_classifier,
    save_family,
    spoil_weights,
    tiny_bert,
)

pytestmark = pytest.mark.slow

# Parts of the largest logit. These models' weights are far larger than real ones, which shows in 16 bits.
DEVIATION_MAX = {"float32": 1e-4, "bfloat16": 0.03}
TEXTS = [text for text in SENTENCES if text.strip()]
PAIRS = [
    *((query, document) for query in TEXTS[:3] for document in TEXTS),
    ("x", " ".join(TEXTS) * 3),
    (" ".join(TEXTS) * 3, "x"),
    (" ".join(TEXTS) * 3, " ".join(TEXTS) * 2),
    ("a query without a document", ""),
]


def load(folder: Path, task: str, dtype: str = "float32", cache: str = "") -> tuple[EncoderEngine, Loaded]:
    engine = EncoderEngine()
    return engine, engine.load(Load("m", str(folder), dtype, "cpu", 1, cache, task))


def score(engine: EncoderEngine, tokens: list[Tokens]) -> npt.NDArray[np.float32]:
    encoded = engine.encode(
        Encode(
            1,
            "m",
            b"".join(each.ids for each in tokens),
            tuple(each.count for each in tokens),
            tuple(each.second_start for each in tokens),
        )
    )
    assert encoded.bad == ()
    return rows_of(encoded)


def rows_of(encoded: Encoded) -> npt.NDArray[np.float32]:
    return np.frombuffer(encoded.rows, dtype="<f4").reshape(-1, encoded.width)


def assert_close(ours: npt.NDArray[np.float32], theirs: npt.NDArray[np.float32], deviation_max: float) -> None:
    assert ours.shape == theirs.shape
    worst = float(np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max()))
    assert worst <= deviation_max, f"the worst logit strays by {worst:.6f}"


@pytest.mark.parametrize("labels", [1, 3])
@pytest.mark.parametrize("name", CLASSIFIERS)
def test_pairs_get_the_logits_of_a_cross_encoder(tmp_path: Path, name: str, labels: int) -> None:
    save_classifier(tmp_path / "m", name, task="score", labels=labels)
    theirs = CrossEncoder(str(tmp_path / "m"), device="cpu", local_files_only=True)
    expected = theirs.predict(PAIRS, activation_fn=torch.nn.Identity()).reshape(len(PAIRS), labels)
    tokens = Tokenizer.load(tmp_path / "m").encode_pairs(PAIRS)
    assert np.ptp(expected, axis=0).min() > 0.05, "the model does not tell the pairs apart"

    for dtype, deviation_max in DEVIATION_MAX.items():
        engine, loaded = load(tmp_path / "m", "score", dtype)

        assert_close(score(engine, tokens), expected, deviation_max)
        assert (loaded.width, len(loaded.labels)) == (labels, labels)
        assert loaded.activation == ("sigmoid" if labels == 1 else "softmax")


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_tokens_get_the_logits_of_transformers(tmp_path: Path, name: str) -> None:
    save_classifier(tmp_path / "m", name, task="tag", labels=5)
    theirs = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path / "m")
    texts = [np.frombuffer(each.ids, dtype="<i4") for each in Tokenizer.load(tmp_path / "m").encode(TEXTS)]
    with torch.inference_mode():
        rows = [theirs(torch.from_numpy(text.astype(np.int64))[None]).logits[0].numpy() for text in texts]
    batch = Encode(1, "m", np.concatenate(texts).tobytes(), tuple(map(len, texts)))

    for dtype, deviation_max in DEVIATION_MAX.items():
        engine, loaded = load(tmp_path / "m", "tag", dtype)
        encoded = engine.encode(batch)

        assert encoded.bad == ()
        assert_close(rows_of(encoded), np.concatenate(rows), deviation_max)
        assert (loaded.width, loaded.activation) == (5, "softmax")


def test_a_model_saved_by_cross_encoder_is_served_packed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_classifier(tmp_path / "source", "bert", task="score", labels=1)
    theirs = CrossEncoder(str(tmp_path / "source"), device="cpu", activation_fn=torch.nn.Identity())
    theirs.save(str(tmp_path / "m"))
    caplog.set_level(logging.INFO, "appliance.engine")

    engine, loaded = load(tmp_path / "m", "score")

    assert loaded.activation == "identity"
    assert "padded" not in caplog.text
    expected = theirs.predict(PAIRS)[:, None]
    assert_close(score(engine, Tokenizer.load(tmp_path / "m").encode_pairs(PAIRS)), expected, DEVIATION_MAX["float32"])


def test_another_family_is_served_padded_and_the_log_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_classifier(tmp_path / "m", "distilbert", task="score", labels=2)
    caplog.set_level(logging.INFO, "appliance.engine")

    load(tmp_path / "m", "score")

    assert "runs padded, through transformers: model_type 'distilbert'" in caplog.text
    assert "agrees with its reference: logits stray by 0.0000" in caplog.text


def test_the_second_text_matters_to_a_model_that_is_told_of_it(tmp_path: Path) -> None:
    save_classifier(tmp_path / "m", "bert", task="score", labels=1)
    engine, _ = load(tmp_path / "m", "score")
    tokens = Tokenizer.load(tmp_path / "m").encode_pairs([("the quick", "brown fox")])
    assert tokens[0].second_start == 5  # [CLS] the quick in three tokens [SEP]

    told = score(engine, tokens)
    untold = engine.encode(Encode(1, "m", tokens[0].ids, (tokens[0].count,)))

    assert abs(float(told[0, 0] - rows_of(untold)[0, 0])) > 1e-4  # the weights are random: how much is chance


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_a_batch_gives_each_pair_what_it_gets_alone(tmp_path: Path, name: str) -> None:
    save_classifier(tmp_path / "m", name, task="score", labels=2)
    engine, _ = load(tmp_path / "m", "score")
    tokens = Tokenizer.load(tmp_path / "m").encode_pairs(PAIRS)

    together = score(engine, tokens)

    alone = np.concatenate([score(engine, [each]) for each in tokens])
    np.testing.assert_allclose(alone, together, atol=1e-4)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_pairs_are_tokenized_as_transformers_does_it(tmp_path: Path, name: str) -> None:
    save_classifier(tmp_path / "m", name, task="score", labels=1)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")

    ours = Tokenizer.load(tmp_path / "m").encode_pairs(PAIRS)

    queries, documents = [query for query, _ in PAIRS], [document for _, document in PAIRS]
    expected = theirs(queries, documents, truncation="longest_first", max_length=64)
    whole = theirs(queries, documents, truncation=False)["input_ids"]
    for place, tokens in enumerate(ours):
        types = expected["token_type_ids"][place] if "token_type_ids" in expected else []
        assert np.frombuffer(tokens.ids, dtype="<i4").tolist() == expected["input_ids"][place], PAIRS[place]
        assert tokens.second_start == (types.index(1) if 1 in types else 0)
        assert tokens.is_truncated == (len(whole[place]) > 64)


@pytest.mark.parametrize("room", [1, 2, 7, 10, 11])
def test_truncation_follows_the_tokenizers_library(tmp_path: Path, room: int) -> None:
    save_classifier(tmp_path / "m", "bert", task="score", labels=1)
    rust = RustTokenizer.from_file(str(tmp_path / "m" / "tokenizer.json"))
    rust.enable_truncation(room + 3, strategy="longest_first")  # [CLS] and two [SEP]
    word = "x"  # one token

    for first in range(1, 14):
        for second in range(1, 14):
            encoding = rust.encode(f"{word} " * first, f"{word} " * second)
            theirs = encoding.sequence_ids.count(0), encoding.sequence_ids.count(1)

            assert longest_first(first, second, room=room) == theirs, (first, second)


def test_a_pair_that_may_not_be_cut_is_refused_by_its_index(tmp_path: Path) -> None:
    save_classifier(tmp_path / "m", "bert", task="score", labels=1)
    tokenizer = Tokenizer.load(tmp_path / "m")

    with pytest.raises(TooLong, match="the query with document 11 has") as caught:
        tokenizer.encode_pairs([("a", "b"), ("a", "b " * 200)], truncation="none", first_index=10)

    assert caught.value.param == "documents[11]"
    with pytest.raises(InvalidRequest, match="leaves no room for a pair"):
        Tokenizer.load(tmp_path / "m", 3).encode_pairs([("a", "b")])


@pytest.mark.parametrize(
    ("second_starts", "message"),
    [((1, 1), "2 second_starts do not match 1 texts"), ((3,), "starts at 3 in a text of 3"), ((-1,), "starts at -1")],
)
def test_a_second_part_outside_its_text_is_refused(
    tmp_path: Path, second_starts: tuple[int, ...], message: str
) -> None:
    save_classifier(tmp_path / "m", "bert", task="score", labels=1)
    engine, _ = load(tmp_path / "m", "score")

    with pytest.raises(ValueError, match=message):
        engine.encode(Encode(1, "m", np.array([2, 9, 3], "<i4").tobytes(), (3,), second_starts))


def test_an_embedding_model_takes_no_pairs(tmp_path: Path) -> None:
    save_family(tmp_path / "m", tiny_bert, "mean")
    engine, loaded = load(tmp_path / "m", "embed")

    with pytest.raises(ValueError, match="takes single texts"):
        engine.encode(Encode(1, "m", np.array([2, 9, 3], "<i4").tobytes(), (3,), (1,)))
    assert (loaded.labels, loaded.activation) == ((), "")


def test_an_unknown_task_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="task 'sing' is none of embed, score, tag"):
        load(tmp_path, "sing")


@pytest.mark.parametrize(("name", "task"), [("bert", "score"), ("bert", "tag"), ("distilbert", "score")])
def test_a_head_that_the_files_lack_is_refused(tmp_path: Path, name: str, task: str) -> None:
    save_classifier(tmp_path / "m", name, task=task, labels=1)
    spoil_weights(tmp_path / "m", lambda name, tensor: None if name == "classifier.weight" else tensor)

    with pytest.raises(ValueError, match=r"lack .*classifier\.weight"):
        load(tmp_path / "m", task)


@pytest.mark.parametrize("task", ["score", "tag"])
def test_logits_that_are_no_numbers_are_named_and_never_sent(tmp_path: Path, task: str) -> None:
    save_classifier(tmp_path / "m", "bert", task=task, labels=2)
    poisoned = 150

    def poison(name: str, tensor: torch.Tensor) -> torch.Tensor:
        if name.endswith("word_embeddings.weight"):
            tensor[poisoned] = float("inf")
        return tensor

    engine, _ = load(tmp_path / "m", task)
    batch = Encode(1, "m", np.array([2, 9, 3, 2, poisoned, 3, 2, 9, 9, 3], "<i4").tobytes(), (3, 3, 4))
    sound = rows_of(engine.encode(batch))
    spoil_weights(tmp_path / "m", poison)
    engine_spoiled = EncoderEngine()
    reference = golden.Golden.of("", [np.array([2, 9, 3], "i4")], sound[: 1 if task == "score" else 3])
    with pytest.MonkeyPatch.context() as patch:  # the check texts may hold the token, which would refuse the model
        patch.setattr(classification, "_asked", lambda *_: reference)
        engine_spoiled.load(Load("m", str(tmp_path / "m"), "float32", "cpu", 1, "", task))

    encoded = engine_spoiled.encode(batch)

    rows = rows_of(encoded)
    middle = slice(1, 2) if task == "score" else slice(3, 6)
    assert encoded.bad == (1,)
    assert not rows[middle].any()
    np.testing.assert_allclose(np.delete(rows, middle, axis=0), np.delete(sound, middle, axis=0), atol=1e-5)


def test_the_reference_is_asked_once_for_each_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_classifier(tmp_path / "m", "bert", task="score", labels=1)
    asked = 0
    ask = classification._asked

    def counted(*args: object) -> golden.Golden:
        nonlocal asked
        asked += 1
        return ask(*args)  # type: ignore[arg-type]  # passed on as they came

    monkeypatch.setattr(classification, "_asked", counted)

    for _ in range(2):
        load(tmp_path / "m", "score", cache=str(tmp_path / "cache"))

    assert asked == 1
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_logits_that_stray_are_refused() -> None:
    reference = np.array([[10.0], [-2.0]], dtype=np.float32)

    assert check_logits(reference + np.float32(0.29), reference, dtype=torch.bfloat16) == pytest.approx(0.029)
    with pytest.raises(ValueError, match=r"in bfloat16 .* stray by 0\.0310"):
        check_logits(reference + np.float32(0.31), reference, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="in float32"):
        check_logits(reference + np.float32(0.02), reference, dtype=torch.float32)
    with pytest.raises(ValueError, match="stray by nan"):
        check_logits(reference * np.float32("nan"), reference, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({"id2label": {"0": "no", "1": "yes"}}, ("no", "yes"), "softmax"),
        ({"id2label": {"1": "yes", "0": "no"}, "problem_type": "multi_label_classification"}, ("no", "yes"), "sigmoid"),
        ({"id2label": {"0": "LABEL_0"}, "problem_type": "regression"}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"0": "a", "1": "b"}, "problem_type": "regression"}, ("a", "b"), "identity"),
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0",),
            "identity",
        ),
        (
            {"num_labels": 1, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            ("LABEL_0",),
            "identity",
        ),
    ],
)
def test_the_labels_and_what_makes_scores_of_logits(
    tmp_path: Path, config: dict[str, object], labels: tuple[str, ...], activation: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))

    card = label_card(tmp_path, task="score")

    assert (card.labels, card.activation) == (labels, activation)
    assert label_card(tmp_path, task="tag").activation == "softmax"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: (folder / "config.json").write_text('{"id2label": {"1": "a"}}'),
            "does not number its id2label",
        ),
        (
            lambda folder: (folder / "config.json").write_text(
                '{"sentence_transformers": {"activation_fn": "evil.nn.Sigmoid"}}'
            ),
            "'evil.nn.Sigmoid' is none of",
        ),
        (
            lambda folder: (folder / "modules.json").write_text(
                '[{"path": "", "type": "sentence_transformers.T"}, {"path": "1", "type": "sentence_transformers.Z"}]'
            ),
            "'sentence_transformers.Z' after a classifier",
        ),
    ],
)
def test_labels_that_cannot_be_served_are_refused(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    spoil(tmp_path)

    with pytest.raises(ValueError, match=message):
        label_card(tmp_path, task="score")


def test_rows_of_a_text_that_has_any_bad_number_are_zeros() -> None:
    rows = np.array([[1, 2], [3, np.nan], [5, 6], [7, 8]], dtype=np.float32)

    sound, bad = finite(rows, [1, 2, 1])

    assert bad == (1,)
    assert sound.tolist() == [[1, 2], [0, 0], [0, 0], [7, 8]]
    assert finite(rows[[0, 2]], [1, 1])[1] == ()
