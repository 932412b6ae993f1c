"""LangChain's ChatOpenAI: answers, streams, structured output by both methods, tools."""

from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

from tests.sdk.python.appliance_facts import BASE_URL, GPT, KEY


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Oslo"]


@tool  # type: ignore[untyped-decorator]  # its types are in the clients' environment
def weather(city: Literal["Paris", "Oslo"]) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def chat(**options: Any) -> ChatOpenAI:
    return ChatOpenAI(model=GPT, base_url=BASE_URL, api_key=SecretStr(KEY), temperature=0, max_tokens=64, **options)


def test_it_answers_and_streams() -> None:
    answer = chat().invoke("Say hello.")
    pieces = list(chat(stream_usage=True).stream("Say hello."))

    assert answer.content == "".join(str(piece.content) for piece in pieces)
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] > 0
    assert any(piece.usage_metadata for piece in pieces)


def test_structured_output_by_schema_and_by_function() -> None:
    for method in ("json_schema", "function_calling"):
        found = chat().with_structured_output(City, method=method).invoke("Name a city.")
        assert isinstance(found, City)


def test_a_bound_tool_is_called_and_its_result_is_read() -> None:
    model = chat().bind_tools([weather], tool_choice="weather")
    asked = HumanMessage("What is the weather in Oslo?")
    answer = model.invoke([asked])

    (call,) = answer.tool_calls
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    assert chat().invoke([asked, answer, result]).content


async def test_it_streams_to_async_callers() -> None:
    pieces = [piece async for piece in chat().astream("Say hello.")]

    assert "".join(str(piece.content) for piece in pieces)


def test_it_asks_for_responses_too() -> None:
    assert chat(use_responses_api=True).invoke("Say hello.").text
