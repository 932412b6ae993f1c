"""A chat through the whole appliance on SGLang: the node's grammars, templates and cancels meet a real server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from appliance.workers.engines.sglang.environment import Environment
from tests.appliance_process import ApplianceProcess, wait_gone

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

MODEL = "test/chat"
READY_S = 240.0
QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]


class City(BaseModel):
    name: str = Field(max_length=8)
    people: int = Field(ge=1, le=10)


@pytest.fixture(scope="module")
def appliance(
    environment: Environment, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ApplianceProcess]:
    folder = tmp_path_factory.mktemp("a")
    state = folder / ".appliance"
    state.mkdir()
    (state / "engines").symlink_to(environment.folder.parent)
    config = f"""
[[models]]
name = "{MODEL}"
folder = "{smollm2}"
facts = {{ tasks = ["generate"] }}
tuning = {{ dtype = "float32", engine_threads = 2, generation = {{ runtime = "sglang", sequences_max = 8, \
sequence_tokens_max = 1_000_000, flags = {{ max-total-tokens = 8192 }} }} }}
"""
    with ApplianceProcess(folder, config=config, environ={"APPLIANCE_STATE_DIR": str(state)}) as running:
        running.wait_for_line("ready:", within_s=READY_S)
        yield running


@pytest.fixture(scope="module")
def client(appliance: ApplianceProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=appliance.base_url, api_key="any", max_retries=0, timeout=120)


def test_it_chats_whole_and_streamed(client: openai.OpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": QUESTION, "temperature": 0}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text
    assert "Paris" in text
    assert whole.choices[0].finish_reason == "stop"


def test_a_schema_is_followed(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=City, temperature=1.2)

    assert parsed.choices[0].message.parsed is not None


def test_a_tool_is_called(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "weather", "parameters": parameters, "strict": True}}
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=QUESTION, tools=[tool], tool_choice="required", temperature=0
    )

    (call, *_) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in {"Paris", "Rome"}


def test_log_probabilities_and_choices(client: openai.OpenAI) -> None:
    answer: Any = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, max_tokens=4, logprobs=True, top_logprobs=2, stop=["zzz"]
    )

    assert len(answer.choices) == 3
    assert all(len(choice.logprobs.content) == 4 for choice in answer.choices)


def test_a_bad_request_is_a_400(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "long " * 9000}])

    assert caught.value.code == "context_length_exceeded"


def test_a_client_that_leaves_frees_its_place(client: openai.OpenAI) -> None:
    endless: Any = {"logit_bias": {"2": -100}}
    streams = [
        client.chat.completions.create(model=MODEL, messages=QUESTION, stream=True, max_tokens=500, **endless)
        for _ in range(8)
    ]
    for stream in streams:
        next(iter(stream))
    for stream in streams:
        stream.close()

    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=2)

    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_it_ends_and_leaves_nothing(appliance: ApplianceProcess) -> None:
    family = appliance.family()
    assert any("sglang" in " ".join(process.cmdline()) for process in family)

    assert appliance.stop() == 0

    assert wait_gone(family, within_s=10) == []
