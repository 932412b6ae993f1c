"""OpenAI's Agents SDK: agents with a tool, over Responses and over chats."""

from typing import Literal

import pytest
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.sdk.python.appliance_facts import GPT

set_tracing_disabled(True)
called: list[str] = []


class City(BaseModel):
    name: Literal["Paris", "Oslo"]


@function_tool  # type: ignore[untyped-decorator]  # its types are in the clients' environment
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city."""
    called.append(city)
    return "rain"


@pytest.fixture(params=[OpenAIResponsesModel, OpenAIChatCompletionsModel])
def model(request: pytest.FixtureRequest) -> Model:
    found: Model = request.param(GPT, AsyncOpenAI())
    return found


async def test_an_agent_calls_its_tool_and_goes_on(model: Model) -> None:
    called.clear()
    settings = ModelSettings(tool_choice="weather", max_tokens=40, temperature=0)
    agent = Agent(name="a", instructions="Be brief.", model=model, tools=[weather], model_settings=settings)

    result = await Runner.run(agent, "What is the weather in Oslo?", max_turns=4)

    assert called
    assert isinstance(result.final_output, str)


async def test_an_agents_output_is_of_its_type(model: Model) -> None:
    agent = Agent(name="a", model=model, output_type=City, model_settings=ModelSettings(max_tokens=40))

    result = await Runner.run(agent, "Name a city.")

    assert isinstance(result.final_output, City)


async def test_an_agent_streams(model: Model) -> None:
    agent = Agent(name="a", model=model, model_settings=ModelSettings(max_tokens=64, temperature=0))
    result = Runner.run_streamed(agent, "What is the capital of France?")
    kinds = [event.type async for event in result.stream_events()]

    assert "raw_response_event" in kinds
    assert result.final_output
