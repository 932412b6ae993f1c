"""Instructor: objects of a type, by forced tools and by JSON schema."""

from typing import Literal

import instructor
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.sdk.python.appliance_facts import GPT


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Oslo"]
    people: int


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA])
def test_what_comes_is_of_its_type(mode: instructor.Mode) -> None:
    client = instructor.from_openai(OpenAI(), mode=mode)

    found = client.chat.completions.create(
        model=GPT,
        response_model=City,
        messages=[{"role": "user", "content": "Name a city."}],
        max_tokens=60,
        temperature=0,
        max_retries=0,
    )

    assert isinstance(found, City)
