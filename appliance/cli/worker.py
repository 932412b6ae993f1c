"""`appliance worker`: one node alone, on a NATS given by URL."""

import asyncio
import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import click
from prometheus_client import start_http_server

from appliance.cli.plan import PlannedModel, encoder_engines, plan_models
from appliance.cli.startup import config_option, prepare, require_nats, run, startup_errors, stop_signals
from appliance.errors import StartupError
from appliance.hardware import Hardware, detect
from appliance.queue.jetstream import JetStreamNodeQueue
from appliance.settings import Settings
from appliance.workers.device import Place
from appliance.workers.engine_process import (
    SOCKET_NAME_BYTES_MAX,
    SOCKET_PATH_BYTES_MAX,
    EngineProcess,
    host_command,
)
from appliance.workers.engines.sglang.command import sglang_command
from appliance.workers.engines.sglang.environment import Environment
from appliance.workers.node import Node, ServedModel
from appliance.workers.raw_texts import RawTexts
from appliance.workers.store import CACHE_FOLDER, KEPT_FOLDER, verified_folder
from appliance.workers.tokenize import Tokenizer
from appliance.workers.vector_space import VectorSpace
from appliance.workers.writing.engine import TextEngineProcess
from appliance.workers.writing.node import WritingNode, WritingPlace, WrittenModel
from appliance.workers.writing.writer import Writer

RAW_TOKENS_MAX = 16_384  # of a text that a spaCy model reads, where its facts say nothing: 65,536 characters

_log = logging.getLogger(__name__)


@click.command("worker")
@config_option
def worker_command(config_file: Path | None) -> None:
    """Run a worker node; needs `nats.url`."""
    with startup_errors():
        settings = prepare(config_file, part="worker")
        require_nats(settings)
        hardware = detect(settings.worker.device, environ=os.environ)
        planned = plan_models(settings, hardware=hardware)
        for warning in filter(None, (each.warning for each in planned)):
            _log.warning("%s", warning)
        models = [served_model(each, settings) for each in planned if each.generation is None]
        written = [written_model(each, settings) for each in planned if each.generation is not None]
        with sockets_dir(Path(settings.state_dir, "run").absolute()) as folder:
            run(_serve(settings, models=models, written=written, hardware=hardware, sockets_dir=folder))


async def _serve(
    settings: Settings,
    *,
    models: list[ServedModel],
    written: list[WrittenModel],
    hardware: Hardware,
    sockets_dir: Path,
) -> None:
    stop = stop_signals()
    worker = settings.worker
    if worker.metrics_port:
        start_http_server(worker.metrics_port, addr=worker.metrics_host)

    async with JetStreamNodeQueue(settings.nats, settings.queue) as queue:
        nodes: list[Node | WritingNode] = [
            WritingNode(
                queue,
                model=model,
                place=_writing_place(settings, model, device, sockets_dir=sockets_dir),
                worker=worker,
                settings=settings.queue,
            )
            for model in written
            for device in hardware.devices
        ]
        if models:
            places = _places(settings, models, hardware=hardware, sockets_dir=sockets_dir)
            nodes.append(Node(queue, models=models, places=places, worker=worker, settings=settings.queue))
        async with asyncio.TaskGroup() as group:
            for node in nodes:
                group.create_task(node.run(stop))


def _places(settings: Settings, models: Sequence[ServedModel], *, hardware: Hardware, sockets_dir: Path) -> list[Place]:
    """Of the engines that encode."""
    worker = settings.worker
    places, threads = encoder_engines(
        worker, [model.preset for model in models], hardware=hardware, cores=len(os.sched_getaffinity(0))
    )

    def engine_of(name: str) -> EngineProcess:
        return EngineProcess(
            host_command(worker.engine, threads=threads),
            name=f"{worker.engine} on {name}",
            sockets_dir=sockets_dir,
            start_timeout_s=worker.engine_start_s,
            batch_timeout_s=worker.batch_timeout_s,
        )

    return [Place(name, device, threads, partial(engine_of, name)) for name, device in places]


def _writing_place(settings: Settings, model: WrittenModel, device: str, *, sockets_dir: Path) -> WritingPlace:
    """One engine a model and device; on the CPU with as many threads as suit the model."""
    worker = settings.worker
    tuning = model.preset.tuning
    assert tuning.generation is not None, "it writes: see `plan.py`"
    threads = min(len(os.sched_getaffinity(0)), worker.engine_threads or tuning.engine_threads or 256)
    name = f"{device}/{model.name}"
    if worker.engine == "fake":
        kind, command = "fake", host_command("fake-texts", threads=threads)
    elif tuning.generation.runtime == "sglang":
        kind, command = "sglang", sglang_command(Environment.of(settings.state_dir).folder, threads=threads)
    else:
        kind, command = "generator", host_command("generator", threads=threads)

    def engine() -> TextEngineProcess:
        return TextEngineProcess(
            command,
            name=f"{kind} on {name}",
            sockets_dir=sockets_dir,
            start_timeout_s=worker.engine_start_s,
            batch_timeout_s=worker.batch_timeout_s,
        )

    return WritingPlace(name, device, threads, engine)


@contextlib.contextmanager
def sockets_dir(wanted: Path) -> Iterator[Path]:
    """`wanted`, made if need be; a folder in the system's temporary one where its path is too long for a socket."""
    if len(os.fsencode(wanted)) + SOCKET_NAME_BYTES_MAX <= SOCKET_PATH_BYTES_MAX:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield wanted
    else:
        with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
            yield Path(folder)


def written_model(planned: PlannedModel, settings: Settings) -> WrittenModel:
    """Find the files of a model that writes, and verify them. Blocks like `served_model`."""
    preset, generation = planned.preset, planned.generation
    assert generation is not None, "it writes"
    folder = verified_folder(preset.facts, planned.settings, cache_dir=Path(settings.state_dir, CACHE_FOLDER))
    writer = Writer.load(folder, preset.facts, tokens_max=generation.sequence_tokens_max)
    return WrittenModel(preset, folder, writer)


def served_model(planned: PlannedModel, settings: Settings) -> ServedModel:
    """Find the model's files, and verify them. Blocks; a hub model is downloaded on its first start."""
    preset, model = planned.preset, planned.settings
    folder = verified_folder(preset.facts, model, cache_dir=Path(settings.state_dir, CACHE_FOLDER))
    if preset.facts.runtime == "spacy":
        texts = RawTexts(preset.facts.tokens_max or RAW_TOKENS_MAX)
        return ServedModel(preset, folder, texts, VectorSpace(model.name))
    kept = Path(settings.state_dir, KEPT_FOLDER).absolute()
    try:
        space = VectorSpace.of(preset.facts, folder, is_own_folder=bool(model.folder))
    except ValueError as exc:
        raise StartupError(f"the files of {model.name} cannot be read: {exc}") from exc
    return ServedModel(preset, folder, Tokenizer.load(folder, preset.facts.tokens_max), space, str(kept))
