"""Reranking and extraction over HTTP on a running appliance, against sentence-transformers and transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.appliance_process import ApplianceProcess

pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

import torch
import transformers
from sentence_transformers import CrossEncoder

from tests.tiny_models import SENTENCES, save_classifier

pytestmark = pytest.mark.slow

RANKER, FINDER = "tiny/ranker", "tiny/finder"
TASKS = {RANKER: ("rerank", "score", 1), FINDER: ("extract", "tag", 4)}
QUERY = "the quick brown fox"
TEXTS = [text for text in SENTENCES if text.strip()] * 3
LONG = "again and again the same words are said " * 20  # the tiny models take 64 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models' files."""
    folder = tmp_path_factory.mktemp("tiny-models")
    for name, (_, task, labels) in TASKS.items():
        save_classifier(folder / name, "bert", task=task, labels=labels)
    return folder


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    """Of an appliance with both models, whose requests are cut into chunks of four."""
    tables = [
        f'[[models]]\nname = "{name}"\nfolder = "{folder / name}"\nfacts = {{ tasks = ["{task}"] }}\n'
        'tuning = { dtype = "float32" }\n'
        for name, (task, _, _) in TASKS.items()
    ]
    config = "\n".join(["[queue]\nchunk_inputs_max = 4\n", *tables])
    with ApplianceProcess(folder / "appliance", config=config) as appliance:
        appliance.wait_for_line("ready:")
        with httpx.Client(base_url=appliance.url, timeout=30) as client:
            yield client


def found_of(answer: httpx.Response) -> Any:  # `Any`: an answer's JSON
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_ordered_as_the_reference_scores_them(client: httpx.Client, folder: Path, path: str) -> None:
    model = CrossEncoder(str(folder / RANKER), device="cpu", local_files_only=True)
    expected = model.predict([(QUERY, text) for text in TEXTS], activation_fn=torch.nn.Sigmoid())

    found = found_of(client.post(path, json={"model": RANKER, "query": QUERY, "documents": TEXTS}))

    scores = {one["index"]: one["relevance_score"] for one in found["results"]}
    assert [scores[index] for index in range(len(TEXTS))] == pytest.approx([float(one) for one in expected], abs=1e-3)
    order = [(-one["relevance_score"], one["index"]) for one in found["results"]]
    assert order == sorted(order)
    assert found["usage"]["total_tokens"] > len(TEXTS)


def test_dict_documents_are_ranked_by_their_fields(client: httpx.Client) -> None:
    body = {"model": RANKER, "query": QUERY, "rank_fields": ["title", "text"], "return_documents": True, "top_n": 2}
    documents = [{"text": "b", "title": "a", "id": number} for number in range(3)]

    found = found_of(client.post("/v1/rerank", json={**body, "documents": documents}))
    plain = found_of(client.post("/v1/rerank", json={**body, "documents": ["a\nb"]}))

    assert [one["document"] for one in found["results"]] == documents[:2]
    assert found["results"][0]["relevance_score"] == pytest.approx(plain["results"][0]["relevance_score"], abs=1e-5)


def test_a_document_that_is_cut_is_announced_or_refused(client: httpx.Client) -> None:
    documents = [*TEXTS[:5], LONG]
    body = {"model": RANKER, "query": QUERY, "documents": documents}

    cut = client.post("/v1/rerank", json=body)
    refused = client.post("/v1/rerank", json={**body, "truncation": False})

    assert (cut.status_code, cut.headers["x-appliance-truncated"]) == (200, "5")
    assert refused.status_code == 400
    assert refused.json()["message"].startswith("documents[5]: the query with document 5 has ")


def test_a_document_is_cut_to_what_the_client_allows(client: httpx.Client) -> None:
    body = {"model": RANKER, "query": QUERY, "max_tokens_per_doc": 3}

    answer = client.post("/v2/rerank", json={**body, "documents": ["a b c d e f", "a b c"]})

    cut = found_of(answer)
    assert answer.headers["x-appliance-truncated"] == "0"
    assert cut["results"][0]["relevance_score"] == pytest.approx(cut["results"][1]["relevance_score"], abs=1e-5)


def test_msgpack_says_the_same(client: httpx.Client) -> None:
    body = {"model": RANKER, "query": QUERY, "documents": TEXTS[:3]}
    kind = "application/msgpack"

    packed = client.post(
        "/v2/rerank", content=msgspec.msgpack.encode(body), headers={"content-type": kind, "accept": kind}
    )

    plain = found_of(client.post("/v2/rerank", json=body))
    assert packed.status_code == 200
    ranked = msgspec.msgpack.decode(packed.content)["results"]
    assert [one["index"] for one in ranked] == [one["index"] for one in plain["results"]]


def test_entities_are_those_that_the_reference_finds(client: httpx.Client, folder: Path) -> None:
    find = transformers.pipeline(
        "token-classification", model=str(folder / FINDER), aggregation_strategy="first", ignore_labels=[]
    )

    found = found_of(client.post("/v1/extract", json={"model": FINDER, "input": TEXTS}))

    assert [one["index"] for one in found["data"]] == list(range(len(TEXTS)))
    for text, one in zip(TEXTS, found["data"], strict=True):
        expected = [(span["start"], span["end"], span["entity_group"]) for span in find(text)]
        assert [(each["start"], each["end"], each["label"]) for each in one["entities"]] == expected
        assert all(text[each["start"] : each["end"]] == each["text"] for each in one["entities"])
    assert any(one["entities"] for one in found["data"])


def test_labels_and_scores_narrow_what_is_found(client: httpx.Client) -> None:
    body = {"model": FINDER, "input": TEXTS}

    everything = found_of(client.post("/v1/extract", json=body))
    labels = sorted({each["label"] for one in everything["data"] for each in one["entities"]})
    only = found_of(client.post("/v1/extract", json={**body, "labels": labels[:1]}))
    nothing = found_of(client.post("/v1/extract", json={**body, "score_min": 1.0}))
    unknown = client.post("/v1/extract", json={**body, "labels": ["PERSON"]})

    assert {each["label"] for one in only["data"] for each in one["entities"]} == set(labels[:1])
    assert not any(one["entities"] for one in nothing["data"])
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "labels")
    assert labels[0] in unknown.json()["error"]["message"]


def test_a_text_that_is_cut_is_announced_or_refused(client: httpx.Client) -> None:
    body = {"model": FINDER, "input": [*TEXTS[:5], LONG]}

    cut = client.post("/v1/extract", json=body)
    refused = client.post("/v1/extract", json={**body, "truncate": "NONE"})

    assert (cut.status_code, cut.headers["x-appliance-truncated"]) == (200, "5")
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "input[5]")


@pytest.mark.parametrize(
    ("path", "body", "right"),
    [
        ("/v1/rerank", {"model": FINDER, "query": "q", "documents": ["a"]}, "/v1/extract"),
        ("/v1/extract", {"model": RANKER, "input": "a"}, "/v1/rerank"),
        ("/v1/embeddings", {"model": RANKER, "input": "a"}, "/v1/rerank"),
    ],
)
def test_a_model_of_another_kind_is_named_its_endpoint(
    client: httpx.Client, path: str, body: dict[str, object], right: str
) -> None:
    answer = client.post(path, json=body)

    assert answer.status_code == 400
    assert right in answer.json()["message"]
