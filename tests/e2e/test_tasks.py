"""Rerank, classify and extract, from the dispatcher to a real engine process and back, against the references."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from appliance.errors import InvalidRequest, TooLong
from appliance.gateway.dispatch import Dispatcher
from appliance.jobs import Classify, Embed, Extract, Job, Labels, Part, Rerank, Scores, Span, Spans, Task
from appliance.presets import load_preset, shipped_presets_dir
from appliance.queue.memory import MemoryBroker
from appliance.settings import ModelSettings, QueueSettings, WorkerSettings
from appliance.workers.device import Place
from appliance.workers.engine_process import EngineProcess, host_command
from appliance.workers.node import Node, ServedModel
from appliance.workers.tokenize import Tokenizer
from appliance.workers.vector_space import VectorSpace

pytest.importorskip("torch")
pytest.importorskip("sentence_transformers")

import torch
import transformers
from sentence_transformers import CrossEncoder

from tests.tiny_models import SENTENCES, save_classifier

pytestmark = pytest.mark.slow

TEXTS = [text for text in SENTENCES if text.strip()]
MODELS = {"ranker": ("rerank", 1), "labeller": ("classify", 3), "finder": ("extract", 4)}
TASKS = {"rerank": "score", "classify": "score", "extract": "tag"}


class Appliance:
    """A dispatcher and a node that holds one tiny model of each kind, in one engine process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.dispatcher = Dispatcher(pending_requests_max=10, pending_bytes_max=1_000_000)

    async def ask(self, model: str, task: Task) -> tuple[Part, ...]:
        job = Job(f"job-{time.monotonic_ns()}", model, task, self.dispatcher.reply_to, time.time() + 60)
        (result,) = await self.dispatcher.run([job])
        assert result.usage.input_tokens > 0
        return result.parts

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        broker = MemoryBroker(QueueSettings())
        stop = asyncio.Event()
        async with AsyncExitStack() as stack:
            self.dispatcher.attach(await stack.enter_async_context(broker.gateway_queue(self.dispatcher)))
            queue = await stack.enter_async_context(broker.node_queue())
            node = Node(
                queue,
                models=[self._served(name) for name in MODELS],
                places=[Place("cpu/0", "cpu", 1, self._engine)],
                worker=WorkerSettings(calibration_s=0),
                settings=broker.settings,
            )
            serving = asyncio.create_task(node.run(stop))
            try:
                yield
            finally:
                stop.set()
                await asyncio.wait_for(serving, 30)

    def _served(self, name: str) -> ServedModel:
        kind, labels = MODELS[name]
        save_classifier(self.folder / name, "bert", task=TASKS[kind], labels=labels)
        settings = ModelSettings(name=name, facts={"tasks": [kind]}, tuning={"dtype": "float32"})
        preset = load_preset(settings, hardware="cpu", presets_dirs=[shipped_presets_dir()])
        return ServedModel(preset, self.folder / name, Tokenizer.load(self.folder / name), VectorSpace(name))

    def _engine(self) -> EngineProcess:
        return EngineProcess(
            host_command("encoder", threads=1),
            name="tiny",
            sockets_dir=self.folder,
            start_timeout_s=60,
            batch_timeout_s=60,
        )


async def test_every_task_gives_what_the_reference_gives(tmp_path: Path) -> None:
    appliance = Appliance(tmp_path)
    async with appliance.running():
        ranked = await appliance.ask("ranker", Rerank(TEXTS[0], tuple(TEXTS)))
        cut = await appliance.ask("ranker", Rerank(TEXTS[0], tuple(TEXTS), document_tokens_max=2))
        labelled = await appliance.ask("labeller", Classify(tuple(TEXTS)))
        found = await appliance.ask("finder", Extract(tuple(TEXTS)))
        only = await appliance.ask("finder", Extract(tuple(TEXTS), labels=("LABEL_1",)))
        with pytest.raises(InvalidRequest, match="serves rerank, not embed"):
            await appliance.ask("ranker", Embed(("text",)))
        with pytest.raises(InvalidRequest, match="'labels' has 'PERSON', which the model does not find") as unknown:
            await appliance.ask("finder", Extract(tuple(TEXTS), labels=("LABEL_1", "PERSON")))
        with pytest.raises(TooLong) as too_long:
            await appliance.ask("ranker", Rerank("query", ("short", "long " * 5000), truncation="none"))
    assert unknown.value.param == "labels"
    assert too_long.value.param == "documents[1]"

    assert scores_of(ranked) == pytest.approx(relevance(tmp_path / "ranker", TEXTS), abs=1e-3)
    assert scores_of(cut) != pytest.approx(scores_of(ranked), abs=1e-4)
    (labels,) = labelled
    assert isinstance(labels, Labels)
    ours = np.frombuffer(labels.data, "<f4").reshape(-1, 3)
    assert np.allclose(ours, probabilities(tmp_path / "labeller"), atol=1e-3)
    expected = entities(tmp_path / "finder")
    assert [[(span.start, span.end, span.label) for span in spans] for spans in spans_of(found)] == [
        [span[:3] for span in spans] for spans in expected
    ]
    scores = [span.score for spans in spans_of(found) for span in spans]
    assert scores == pytest.approx([span[3] for spans in expected for span in spans], abs=1e-3)
    assert {span.label for spans in spans_of(only) for span in spans} == {"LABEL_1"}


def scores_of(parts: tuple[Part, ...]) -> list[float]:
    assert all(isinstance(part, Scores) for part in parts)
    data = b"".join(part.data for part in parts if isinstance(part, Scores))
    return [float(score) for score in np.frombuffer(data, "<f4")]


def spans_of(parts: tuple[Part, ...]) -> list[tuple[Span, ...]]:
    return [spans for part in parts if isinstance(part, Spans) for spans in part.inputs]


def relevance(folder: Path, documents: list[str]) -> list[float]:
    model = CrossEncoder(str(folder), device="cpu", local_files_only=True)
    pairs = [(TEXTS[0], document) for document in documents]
    return [float(score) for score in model.predict(pairs, activation_fn=torch.nn.Sigmoid())]


def probabilities(folder: Path) -> list[list[float]]:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with torch.inference_mode():
        logits = [model(**tokenizer(text, truncation=True, return_tensors="pt")).logits[0] for text in TEXTS]
    return [[float(value) for value in row.softmax(-1)] for row in logits]


def entities(folder: Path) -> list[list[tuple[int, int, str, float]]]:
    """What transformers' own pipeline finds, with the label of a word's first token for all of it."""
    find = transformers.pipeline(
        "token-classification", model=str(folder), aggregation_strategy="first", ignore_labels=[]
    )
    return [
        [(span["start"], span["end"], span["entity_group"], float(span["score"])) for span in find(text)]
        for text in TEXTS
    ]
