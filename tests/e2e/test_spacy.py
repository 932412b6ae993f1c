"""Entities by the packaged spaCy model, through a node and a real engine, against spaCy itself."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from appliance.errors import InvalidRequest
from appliance.jobs import Embed, Extract, Rows, Spans
from appliance.presets import load_preset, shipped_presets_dir
from appliance.settings import ModelSettings
from appliance.workers.node import ServedModel
from appliance.workers.raw_texts import RawTexts
from appliance.workers.store import verified_folder
from appliance.workers.vector_space import VectorSpace
from tests.fake_model import packaged_minilm
from tests.node_appliance import Asker, node_appliance, served

pytest.importorskip("torch")
spacy = pytest.importorskip("spacy")

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

NAME = "spacy/en_core_web_sm"
TEXTS = (
    "Apple is looking at buying a startup in the United Kingdom for $1 billion.",
    "🙂🙂 Angela Merkel met Emmanuel Macron in Paris on 3 May 2017. 🙂",
    "nothing to be found here",
    "e\u0301le\u0300ve \u202eMicrosoft\u202c visited Berlin",
    "\n \t ",
    "x",
    "The United Nations " * 300,
)


def model_of(tmp_path: Path) -> ServedModel:
    settings = ModelSettings(name=NAME)
    preset = load_preset(settings, hardware="cpu", presets_dirs=[shipped_presets_dir()])
    folder = verified_folder(preset.facts, settings, cache_dir=tmp_path)
    return ServedModel(preset, folder, RawTexts(preset.facts.tokens_max or 0), VectorSpace(NAME))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Asker]:
    folder = tmp_path_factory.mktemp("node")
    models = [model_of(folder), served("minilm", packaged_minilm())]
    async with node_appliance(models, sockets_dir=folder) as asker:
        yield asker


async def test_the_entities_are_spacys_own(node: Asker, tmp_path: Path) -> None:
    theirs = spacy.load(model_of(tmp_path).folder)

    result = await node.ask(NAME, Extract(TEXTS))

    (part,) = result.parts
    assert isinstance(part, Spans)
    for text, found in zip(TEXTS, part.inputs, strict=True):
        expected = [(span.start_char, span.end_char, span.label_) for span in theirs(text).ents]
        assert [(span.start, span.end, span.label) for span in found] == expected
    assert [TEXTS[1][span.start : span.end] for span in part.inputs[1]][:3] == [
        "Angela Merkel",
        "Emmanuel Macron",
        "Paris",
    ]
    assert result.usage.input_tokens == sum(-(-len(text) // 4) for text in TEXTS)


async def test_an_encoder_runs_in_the_same_process(node: Asker) -> None:
    result = await node.ask("minilm", Embed(("a text",)))

    assert [type(part) for part in result.parts] == [Rows]


async def test_labels_are_those_of_the_model(node: Asker) -> None:
    with pytest.raises(InvalidRequest, match="PERSON"):
        await node.ask(NAME, Extract(("a",), labels=("DRUG",)))
