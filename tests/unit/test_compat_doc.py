"""docs/compat.md says of every endpoint, field, header, error and limit what the code does, and nothing else."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.compat import (
    chat_messages,
    cohere_classify,
    cohere_documents,
    cohere_generation,
    cohere_inputs,
    cohere_tokens,
    decisions,
    extract,
    openai_chat,
    openai_completions,
    openai_embeddings,
    rerank,
    responses_settings,
    sampling,
)
from appliance.errors import ApplianceError, StartupError
from appliance.gateway import pending_calls
from appliance.gateway.openapi import HEADERS
from appliance.gateway.operation import Operation
from appliance.settings import AliasSettings, GatewaySettings
from appliance.workers.writing import schemas
from tests.gateway_parts import BODIES, Gateway, url_of

TEXT = (Path(__file__).parents[2] / "docs" / "compat.md").read_text()
LIMITS = {
    "body, MB": GatewaySettings().body_bytes_max // 2**20,
    "texts of `/v1/embeddings`": openai_embeddings.INPUTS_MAX,
    "texts of `/v1/extract`": extract.INPUTS_MAX,
    "texts of `/v1/embed`, `/v2/embed` and `/v1/classify`": cohere_inputs.TEXTS_MAX,
    "examples of `/v1/classify`": cohere_classify.EXAMPLES_MAX,
    "characters of `/v1/tokenize`": cohere_tokens.TEXT_CHARS_MAX,
    "tokens of `/v1/detokenize`": cohere_tokens.TOKENS_MAX,
    "documents of a rerank": rerank.DOCUMENTS_MAX,
    "bytes of a rerank's query": rerank.QUERY_BYTES_MAX,
    "labels of `/v1/extract`": extract.LABELS_MAX,
    "choices (`n`) of a chat": openai_chat.CHOICES_MAX,
    "messages of a chat, or items of `/v1/responses`": chat_messages.MESSAGES_MAX,
    "functions of a chat": responses_settings.TOOLS_MAX,
    "levels of a JSON schema": responses_settings.SCHEMA_LEVELS_MAX,
    "values in a JSON schema": responses_settings.SCHEMA_VALUES_MAX,
    "properties of one of its objects that are not required": schemas.OPTIONAL_MAX,
    "digits of its `multipleOf`, multiplied with each other": schemas.REMAINDERS_MAX,
    "stop strings of OpenAI's endpoints": sampling.STOPS_MAX,
    "`stop_sequences` of Cohere's": cohere_generation.STOPS_MAX,
    "characters of a stop string": sampling.STOP_CHARS_MAX,
    "tokens of `logit_bias`": sampling.BIASES_MAX,
    "documents of a Cohere chat": cohere_documents.DOCUMENTS_MAX,
    "prompts of `/v1/completions`": openai_completions.PROMPTS_MAX,
    "choices of all prompts of `/v1/completions`": openai_completions.CHOICES_IN_ALL_MAX,
    "questions of `/v1/decisions`": decisions.QUESTIONS_MAX,
    "choices of a question of `/v1/decisions`": decisions.CHOICES_MAX,
    "levels of a score of `/v1/decisions`": decisions.LEVELS_MAX,
    "of a stream, what waits for its client, MB": pending_calls.STREAM_BYTES_MAX // 2**20,
}
VERDICTS = {"served", "ignored", "refused"}
# Whatever type a field has, one of these is a value of it.
SAMPLES: list[Any] = ["word", True, 3, 0.5, ["word"], {"a": "word"}, [{"a": "word"}]]


def sections() -> dict[str, str]:
    """The text below each endpoint's heading, by "METHOD /path"."""
    found: dict[str, str] = {}
    for part in re.split(r"^#+ ", TEXT, flags=re.MULTILINE):
        heading, _, text = part.partition("\n")
        for endpoint in re.findall(r"`([A-Z]+ /[^`]*)`", heading):
            found[endpoint] = text
    return found


def rows(text: str) -> list[list[str]]:
    """The cells of all rows of all tables, heads and rules left out."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    heads = {index - 1 for index, line in enumerate(lines) if set(line) <= set("|- ")}
    kept = [line for index, line in enumerate(lines) if index not in heads and not set(line) <= set("|- ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in kept]


def chapter(name: str) -> str:
    """The text of a chapter, up to the next."""
    return TEXT.split(f"\n## {name}\n")[1].split("\n## ")[0]


def verdicts(endpoint: str) -> dict[str, str]:
    """What is said of each field of an endpoint."""
    return {row[0].strip("`"): row[1].strip("*") for row in rows(sections()[endpoint])}


def operations() -> list[Operation]:
    return list(Gateway().operations())


def endpoints() -> set[str]:
    return {f"{method} {operation.paths[0]}" for operation in operations() for method in operation.methods}


def test_every_endpoint_has_a_section_and_every_section_an_endpoint() -> None:
    assert set(sections()) == endpoints()


def test_every_field_is_told() -> None:
    for operation in operations():
        told = verdicts(f"{operation.methods[0]} {operation.paths[0]}")
        fields = msgspec.structs.fields(operation.body) if operation.body is not None else ()
        assert set(told) == {field.encode_name for field in fields}, operation.paths[0]
        assert set(told.values()) <= VERDICTS, operation.paths[0]


@pytest.mark.slow
async def test_what_is_called_refused_is_refused_and_what_is_called_ignored_is_accepted() -> None:
    paths = [operation.paths[0] for operation in operations() if operation.body is not None]
    assert set(paths) == set(BODIES)
    async with Gateway().client() as client:
        for path in paths:
            for field, verdict in verdicts(f"POST {path}").items():
                answers = [await client.post(url_of(path), json={**BODIES[path], field: sample}) for sample in SAMPLES]
                accepted = [answer for answer in answers if answer.status_code == 200]
                refused = [answer for answer in answers if "not served" in answer.text]
                if verdict == "refused":
                    assert refused, (path, field)
                    assert not accepted, (path, field)
                if verdict == "ignored":
                    assert accepted, (path, field)
                    assert not refused, (path, field)


def test_every_header_is_told() -> None:
    told = set(re.findall(r"`([a-z0-9-]+)`", chapter("Headers")))

    assert told >= set(HEADERS)


def test_every_error_is_told_with_its_status() -> None:
    def tree(kind: type[ApplianceError]) -> list[type[ApplianceError]]:
        return [kind, *(found for child in kind.__subclasses__() for found in tree(child))]

    told = {row[0].strip("`"): int(row[1]) for row in rows(chapter("Errors"))}

    assert told == {kind.code: kind.status for kind in tree(ApplianceError) if kind is not StartupError}


def test_every_limit_is_told() -> None:
    assert {row[0]: int(row[1]) for row in rows(chapter("Limits"))} == LIMITS


def test_every_setting_of_an_alias_is_told() -> None:
    told = {row[0].strip("`") for row in rows(chapter("Aliases"))}

    assert told == {field.name for field in msgspec.structs.fields(AliasSettings)} - {"name", "model"}
