"""What a start says: the names that are served, and calls that are answered when they are pasted."""

import json
import shlex
from typing import get_args

import pytest

from appliance.catalog import Catalog
from appliance.cli import greeting
from appliance.presets import Facts, TaskName
from tests.gateway_parts import KEY, MODELS, Gateway

BASE_URL = "http://appliance/v1"
WRITER = Facts("org/writer", tasks=("generate",), aliases=("gpt-4o-mini", "command-a-03-2025"))


def calls_in(text: str) -> list[list[str]]:
    """The words of each command, as a shell reads them."""
    commands = text.partition("try it:")[2].replace("\\\n", " ").strip().splitlines()
    return [shlex.split(command) for command in commands]


def test_a_start_says_where_it_will_answer() -> None:
    assert greeting.starting(BASE_URL, Catalog.of([WRITER])) == f"base URL: {BASE_URL}\nstarting: 1 model"
    assert greeting.starting(BASE_URL, Catalog.of(MODELS)).endswith("starting: 5 models")


def test_each_model_is_shown_with_what_it_does_and_its_other_names() -> None:
    many = Facts(
        "org/many", tasks=("embed", "rerank"), rerank_by="maxsim", aliases=tuple(f"name-{n}" for n in range(40))
    )

    lines = greeting.ready(BASE_URL, Catalog.of([WRITER, many]), has_keys=False).splitlines()

    assert lines[:4] == [
        f"ready: serving 2 models at {BASE_URL}",
        "  org/writer: generate",
        "      also gpt-4o-mini, command-a-03-2025",
        "  org/many: embed, rerank",
    ]
    names = " ".join(line.strip() for line in lines[4 : lines.index("try it:")])
    assert names == "also " + ", ".join(f"name-{n}" for n in range(40))
    assert max(map(len, lines[: lines.index("try it:")])) <= 100


def test_a_model_that_chats_gets_a_chat() -> None:
    (call,) = calls_in(greeting.ready(BASE_URL, Catalog.of([WRITER]), has_keys=False))

    assert call[:3] == ["curl", "-s", f"{BASE_URL}/chat/completions"]
    assert "authorization: Bearer any" in call
    assert json.loads(call[-1])["model"] == "org/writer"


def test_the_first_model_of_each_kind_gets_a_call() -> None:
    second = Facts("org/second", tasks=("embed", "rerank"), rerank_by="maxsim")

    calls = calls_in(greeting.ready(BASE_URL, Catalog.of([*MODELS, second]), has_keys=True))

    assert [json.loads(call[-1])["model"] for call in calls] == [facts.name for facts in MODELS]
    assert all("authorization: Bearer $KEY" in call for call in calls)


@pytest.mark.parametrize("task", get_args(TaskName))
async def test_the_calls_are_answered(task: TaskName) -> None:
    facts = next(one for one in MODELS if one.tasks == (task,))
    (call,) = calls_in(greeting.ready(BASE_URL, Catalog.of([facts]), has_keys=False))

    async with Gateway().client(**{"content-type": "application/json"}) as client:
        answer = await client.post(call[2], content=call[-1], headers={"authorization": f"Bearer {KEY}"})

    assert answer.status_code == 200, answer.text
    assert "x-appliance-ignored" not in answer.headers
