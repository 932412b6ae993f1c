"""OpenAI's Python client, whose 2.x and 3.x lines are both in use."""

import asyncio
import base64
from collections.abc import Iterator

import numpy as np
import openai
import pytest
import tiktoken
from openai import AsyncOpenAI, AzureOpenAI, OpenAI

from tests.sdk.python.appliance_facts import (
    ALIAS,
    CALLERS,
    CROWDED_URL,
    KEY,
    MODEL,
    RERANK,
    TEXTS,
    URL,
    WIDTH,
    Vectors,
    as_vectors,
    crowd,
    worst_cosine,
)


@pytest.fixture
def client() -> Iterator[OpenAI]:
    """Knows the appliance by OPENAI_BASE_URL and OPENAI_API_KEY alone."""
    with OpenAI() as client:
        yield client


@pytest.fixture
def crowded() -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{CROWDED_URL}/v1", max_retries=0) as client:
        yield client


def vectors_of(client: OpenAI, texts: list[str]) -> Vectors:
    answer = client.embeddings.create(model=ALIAS, input=texts)
    assert [row.index for row in answer.data] == list(range(len(texts)))
    return as_vectors([row.embedding for row in answer.data], count=len(texts))


def test_texts_keep_their_order_and_equal_single_calls(client: OpenAI) -> None:
    together = vectors_of(client, list(TEXTS))
    alone = np.concatenate([vectors_of(client, [text]) for text in TEXTS])

    assert worst_cosine(together, alone) > 0.9999


def test_a_string_is_one_input(client: OpenAI) -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS[0])

    assert answer.object == "list"
    assert answer.model == MODEL
    assert answer.data[0].object == "embedding"
    assert worst_cosine(as_vectors([answer.data[0].embedding], count=1), vectors_of(client, [TEXTS[0]])) > 0.9999


def test_base64_and_floats_are_the_same_numbers(client: OpenAI) -> None:
    floats = client.embeddings.create(model=ALIAS, input=list(TEXTS), encoding_format="float")
    encoded = client.embeddings.with_raw_response.create(model=ALIAS, input=list(TEXTS), encoding_format="base64")

    for row, raw in zip(floats.data, encoded.http_response.json()["data"], strict=True):
        decoded = np.frombuffer(base64.b64decode(raw["embedding"], validate=True), dtype="<f4")
        assert decoded.shape == (WIDTH,)
        assert np.allclose(decoded, row.embedding, atol=1e-6)


def test_usage_is_additive(client: OpenAI) -> None:
    whole = client.embeddings.create(model=ALIAS, input=list(TEXTS)).usage
    parts = [client.embeddings.create(model=ALIAS, input=text).usage for text in TEXTS]

    assert whole.prompt_tokens == whole.total_tokens == sum(part.prompt_tokens for part in parts)
    assert min(part.prompt_tokens for part in parts) > 0


@pytest.mark.parametrize("model", [MODEL, ALIAS])
def test_token_arrays_equal_their_texts(client: OpenAI, model: str) -> None:
    ids = tiktoken.get_encoding("cl100k_base").encode_ordinary_batch(list(TEXTS))

    of_ids = client.embeddings.create(model=model, input=ids)
    of_one = client.embeddings.create(model=model, input=ids[0])

    rows = as_vectors([row.embedding for row in of_ids.data], count=len(TEXTS))
    assert worst_cosine(rows, vectors_of(client, list(TEXTS))) > 0.9999
    assert worst_cosine(as_vectors([of_one.data[0].embedding], count=1), rows[:1]) > 0.9999


def test_2048_inputs_are_one_request(client: OpenAI) -> None:
    texts = [f"text number {index}" for index in range(2048)]

    rows = vectors_of(client, texts)

    assert worst_cosine(rows[[0, 1024, 2047]], vectors_of(client, [texts[0], texts[1024], texts[2047]])) > 0.9999


async def test_many_callers_each_get_their_own_answer() -> None:
    texts = [f"the answer to caller {index}" for index in range(CALLERS)]
    async with AsyncOpenAI() as client:
        answers = await asyncio.gather(*(client.embeddings.create(model=ALIAS, input=text) for text in texts))
        together = await client.embeddings.create(model=ALIAS, input=texts)

    alone = as_vectors([answer.data[0].embedding for answer in answers], count=CALLERS)
    assert worst_cosine(alone, as_vectors([row.embedding for row in together.data], count=CALLERS)) > 0.9999


def test_the_models_own_width_may_be_asked_for_and_others_are_refused(client: OpenAI) -> None:
    own = client.embeddings.create(model=ALIAS, input="x", dimensions=WIDTH)
    as_vectors([own.data[0].embedding], count=1)

    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model=ALIAS, input="x", dimensions=256)
    assert caught.value.param == "dimensions"
    assert str(WIDTH) in caught.value.message


def test_an_alias_may_pad_to_the_width_of_an_existing_column(client: OpenAI) -> None:
    answer = client.embeddings.create(model="padded-to-1536", input=list(TEXTS))

    padded = as_vectors([row.embedding for row in answer.data], count=len(TEXTS), width=1536)
    assert not padded[:, WIDTH:].any()
    assert worst_cosine(padded[:, :WIDTH], vectors_of(client, list(TEXTS))) > 0.9999


def test_a_long_text_is_cut_averaged_or_refused_as_the_alias_says(client: OpenAI) -> None:
    long = "word " * 1000
    cut = client.embeddings.with_raw_response.create(model=ALIAS, input=["short", long])
    averaged = client.embeddings.create(model="averages-long", input=long)

    assert cut.headers["x-appliance-truncated"] == "1"
    assert averaged.usage.prompt_tokens > 1000
    as_vectors([averaged.data[0].embedding], count=1)
    with pytest.raises(openai.BadRequestError) as caught:
        client.embeddings.create(model="refuses-long", input=["short", long])
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "input[1]"


@pytest.mark.parametrize("intent", ["query", "document"])
def test_the_intent_can_be_said_by_the_models_name_or_by_a_field(client: OpenAI, intent: str) -> None:
    by_name = client.embeddings.create(model=f"{ALIAS}@{intent}", input=TEXTS[0])
    by_field = client.embeddings.create(model=ALIAS, input=TEXTS[0], extra_body={"input_type": intent})

    rows = as_vectors([by_name.data[0].embedding, by_field.data[0].embedding], count=2)
    assert worst_cosine(rows[:1], rows[1:]) > 0.9999


def test_a_header_tells_vector_spaces_apart(client: OpenAI) -> None:
    spaces = {
        name: client.embeddings.with_raw_response.create(model=name, input="x").headers["x-appliance-space"]
        for name in (MODEL, ALIAS, "padded-to-1536")
    }

    assert spaces[MODEL] == spaces[ALIAS]
    assert spaces["padded-to-1536"] != spaces[ALIAS]


def test_azures_client_finds_its_deployments(client: OpenAI) -> None:
    with AzureOpenAI(azure_endpoint=URL, api_key=KEY, api_version="2024-10-21") as azure:
        answer = azure.embeddings.create(model=ALIAS, input=list(TEXTS))
        with pytest.raises(openai.NotFoundError) as caught:
            azure.embeddings.create(model="nobody-knows-it", input="x")

    rows = as_vectors([row.embedding for row in answer.data], count=len(TEXTS))
    assert worst_cosine(rows, vectors_of(client, list(TEXTS))) > 0.9999
    assert caught.value.code == "model_not_found"


def test_models_are_listed_and_found(client: OpenAI) -> None:
    listed = {model.id for model in client.models.list()}

    assert {MODEL, ALIAS, RERANK, "padded-to-1536"} <= listed
    for name in (MODEL, ALIAS):
        found = client.models.retrieve(name)
        assert found.id == name
        assert found.object == "model"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": ["fine", ""]}, "input[1]"),
        ({"input": ["x"] * 2049}, "input"),
        ({"input": [[-1]]}, "input"),
        ({"input": [[100261]]}, "input"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_bad_input_is_a_bad_request_that_names_the_field(client: OpenAI, body: dict[str, object], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/embeddings", body={"model": ALIAS, **body}, cast_to=object)

    assert str(caught.value.param).startswith(param)
    assert caught.value.type == "invalid_request_error"
    assert caught.value.code
    assert caught.value.request_id


def test_a_wrong_key_is_an_authentication_error() -> None:
    with OpenAI(api_key="sk-wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.embeddings.create(model=ALIAS, input="x")
    assert caught.value.code == "invalid_api_key"


def test_an_unknown_model_is_not_found(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as embedding:
        client.embeddings.create(model="nobody/knows-it", input="x")
    with pytest.raises(openai.NotFoundError) as retrieval:
        client.models.retrieve("nobody/knows-it")

    assert embedding.value.code == retrieval.value.code == "model_not_found"
    assert embedding.value.param == "model"


def test_a_body_over_the_limit_is_a_status_error(crowded: OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        crowded.embeddings.create(model="quick", input="x" * 2_000_000)
    assert caught.value.status_code == 413
    assert caught.value.code == "request_too_large"


def test_overload_is_retried_and_then_raised_or_served(crowded: OpenAI) -> None:
    with crowd():
        with pytest.raises(openai.InternalServerError) as caught:
            crowded.with_options(max_retries=1).embeddings.create(model="quick", input="x")
        patient = crowded.with_options(max_retries=60)
        raw = patient.embeddings.with_raw_response.create(model="quick", input="x")

    assert caught.value.status_code == 503
    assert caught.value.code == "overloaded"
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "1"
    assert 1 <= int(caught.value.response.headers["retry-after"]) <= 60
    assert raw.retries_taken > 0
    assert len(raw.parse().data) == 1


def test_a_passed_deadline_is_an_internal_server_error_that_is_not_retried(crowded: OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        crowded.with_options(max_retries=2).embeddings.create(
            model="slow", input="x", extra_headers={"x-stainless-read-timeout": "1"}
        )

    assert caught.value.status_code == 504
    assert caught.value.code == "deadline_exceeded"
    assert caught.value.response.request.headers["x-stainless-retry-count"] == "0"
