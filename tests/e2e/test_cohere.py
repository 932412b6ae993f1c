"""Cohere's embed, classify and tokens over HTTP on running appliances, against the reference libraries."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.appliance_process import ApplianceProcess
from tests.e2e.conftest import MODEL
from tests.fake_model import packaged_minilm

pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

import torch
import transformers
from sentence_transformers import SentenceTransformer

from tests.tiny_models import SENTENCES, save_classifier

pytestmark = pytest.mark.slow

TEXTS = [text for text in SENTENCES if text.strip()]
SINGLE, MULTI = "tiny/single", "tiny/multi"
EXAMPLES = [
    ("I love this", "good"),
    ("what a joy", "good"),
    ("a great day", "good"),
    ("I hate this", "bad"),
    ("terrible service", "bad"),
    ("an awful day", "bad"),
]


@pytest.fixture(scope="module")
def client(running: ApplianceProcess) -> Iterator[httpx.Client]:
    """Of the appliance with all-MiniLM-L6-v2."""
    with httpx.Client(base_url=running.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classifiers with the same weights: whose labels exclude each other, and whose don't."""
    folder = tmp_path_factory.mktemp("tiny-classifiers")
    for name in (SINGLE, MULTI):
        save_classifier(folder / name, "bert", task="score", labels=3)
    config = json.loads((folder / MULTI / "config.json").read_text())
    (folder / MULTI / "config.json").write_text(json.dumps(config | {"problem_type": "multi_label_classification"}))
    return folder


@pytest.fixture(scope="module")
def classifiers(folder: Path) -> Iterator[httpx.Client]:
    """Of an appliance with both, whose requests are cut into chunks of four."""
    tables = [
        f'[[models]]\nname = "{name}"\nfolder = "{folder / name}"\nfacts = {{ tasks = ["classify"] }}\n'
        'tuning = { dtype = "float32" }\n'
        for name in (SINGLE, MULTI)
    ]
    config = "\n".join(["[queue]\nchunk_inputs_max = 4\n", *tables])
    with ApplianceProcess(folder / "appliance", config=config) as appliance:
        appliance.wait_for_line("ready:")
        with httpx.Client(base_url=appliance.url, timeout=30) as client:
            yield client


def found_of(answer: httpx.Response) -> Any:  # `Any`: an answer's JSON
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/v1/embed", "/v2/embed", "/v1/v2/embed"])
def test_vectors_are_the_reference_s_in_every_type(client: httpx.Client, path: str) -> None:
    expected = SentenceTransformer(str(packaged_minilm()), device="cpu").encode(TEXTS, normalize_embeddings=True)
    types = ["float", "int8", "uint8", "binary", "ubinary"]

    answer = client.post(path, json={"model": MODEL, "texts": TEXTS, "embedding_types": types})

    found = {kind: np.array(rows, np.float64) for kind, rows in found_of(answer)["embeddings"].items()}
    assert set(found) == set(types)
    assert (found["float"] * expected).sum(axis=1) == pytest.approx(1, abs=1e-4)
    lengths = np.linalg.norm(found["int8"], axis=1)
    assert ((found["int8"] * expected).sum(axis=1) / lengths > 0.999).all()
    assert (found["uint8"] - found["int8"] == 128).all()
    assert (found["ubinary"] - found["binary"] == 128).all()
    bits = np.unpackbits(found["ubinary"].astype(np.uint8), axis=1)
    assert (bits == (expected > 0)).mean() > 0.99
    assert f"model={MODEL}" in answer.headers["x-appliance-space"]


def test_what_is_too_long_is_cut_or_refused_by_its_name(client: httpx.Client) -> None:
    texts = ["short", "word " * 400]

    cut = client.post("/v2/embed", json={"model": MODEL, "texts": texts, "truncate": "START"})
    refused = client.post("/v2/embed", json={"model": MODEL, "texts": texts, "truncate": "NONE"})
    few = client.post("/v2/embed", json={"model": MODEL, "texts": texts, "max_tokens": 8})

    assert cut.headers["x-appliance-truncated"] == "1"
    assert refused.status_code == 400
    assert "'texts[1]' has 402 tokens, the model takes 256" in refused.json()["message"]
    assert found_of(few)["meta"]["billed_units"]["input_tokens"] == 3 + 8
    assert few.headers["x-appliance-truncated"] == "1"


def test_a_width_that_the_model_cannot_have_is_refused_in_cohere_s_words(client: httpx.Client) -> None:
    answer = client.post("/v2/embed", json={"model": MODEL, "texts": ["a"], "output_dimension": 256})

    assert answer.status_code == 400
    assert "'output_dimension' is 256" in answer.json()["message"]


def test_tokens_are_the_model_s(client: httpx.Client) -> None:
    reference = Tokenizer.from_file(str(packaged_minilm() / "tokenizer.json"))
    reference.no_truncation()
    reference.no_padding()
    text = "Tokenizing naïve text, over and over. " * 200
    expected = reference.encode(text, add_special_tokens=False)

    tokens = found_of(client.post("/v1/tokenize", json={"model": MODEL, "text": text}))
    back = found_of(client.post("/v1/detokenize", json={"model": MODEL, "tokens": tokens["tokens"]}))

    assert (tokens["tokens"], tokens["token_strings"]) == (expected.ids, expected.tokens)
    assert back["text"] == reference.decode(expected.ids)


def test_a_token_that_the_model_does_not_know_is_named(client: httpx.Client) -> None:
    answer = client.post("/v1/detokenize", json={"model": MODEL, "tokens": [7592, 2**31 - 1]})

    assert answer.status_code == 400
    assert "tokens[1]" in answer.json()["message"]


def test_texts_are_classified_by_examples(client: httpx.Client) -> None:
    body = {
        "model": MODEL,
        "inputs": ["a wonderful evening", "the worst meal of my life"],
        "examples": [{"text": text, "label": label} for text, label in EXAMPLES],
    }

    found = found_of(client.post("/v1/classify", json=body))["classifications"]

    assert [one["prediction"] for one in found] == ["good", "bad"]
    assert all(set(one["labels"]) == {"good", "bad"} for one in found)
    assert all(sum(each["confidence"] for each in one["labels"].values()) == pytest.approx(1) for one in found)


@pytest.mark.parametrize(("model", "kind"), [(SINGLE, "single-label"), (MULTI, "multi-label")])
def test_a_classifier_s_labels_are_the_reference_s(
    classifiers: httpx.Client, folder: Path, model: str, kind: str
) -> None:
    expected = probabilities(folder / model, is_multi=model == MULTI)

    found = found_of(classifiers.post("/v1/classify", json={"model": model, "inputs": TEXTS}))["classifications"]

    assert [one["input"] for one in found] == TEXTS
    assert {one["classification_type"] for one in found} == {kind}
    for one, row in zip(found, expected, strict=True):
        confidences = {label: each["confidence"] for label, each in one["labels"].items()}
        assert confidences == pytest.approx({f"LABEL_{index}": p for index, p in enumerate(row)}, abs=1e-3)
        if kind == "single-label":
            assert one["prediction"] == max(confidences, key=confidences.__getitem__)
        else:
            assert set(one["predictions"]) == {label for label, p in confidences.items() if p >= 0.5}


def probabilities(folder: Path, *, is_multi: bool) -> list[list[float]]:
    """What transformers says of `TEXTS`, one at a time."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    found: list[list[float]] = []
    for text in TEXTS:
        with torch.no_grad():
            logits = model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=64)).logits[0]
        found.append((logits.sigmoid() if is_multi else logits.softmax(0)).tolist())
    return found
