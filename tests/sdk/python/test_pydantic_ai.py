"""pydantic-ai: text, output of a type, tools; over Responses (its default) and over chats."""

from typing import Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models import Model
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.settings import ModelSettings

from tests.sdk.python.appliance_facts import GPT

SETTINGS = ModelSettings(max_tokens=40, temperature=0)


class City(BaseModel):
    name: Literal["Paris", "Oslo"]


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatModel])
def model(request: pytest.FixtureRequest) -> Model:
    found: Model = request.param(GPT)
    return found


async def test_it_answers(model: Model) -> None:
    result = await Agent(model, instructions="Be brief.", model_settings=SETTINGS).run("Say hello.")

    assert result.output
    assert result.usage().output_tokens > 0


async def test_output_is_of_its_type(model: Model) -> None:
    result = await Agent(model, output_type=City, model_settings=SETTINGS).run("Name a city.")

    assert isinstance(result.output, City)


async def test_it_streams(model: Model) -> None:
    async with Agent(model, model_settings=SETTINGS).run_stream("Say hello.") as result:
        pieces = [piece async for piece in result.stream_text(delta=True)]

    assert "".join(pieces)
