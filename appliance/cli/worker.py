"""`appliance worker`: one node alone, on a NATS given by URL."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import click
from prometheus_client import start_http_server

from appliance.cli.gateway import require_nats
from appliance.cli.startup import config_option, prepare, run, startup_errors, stop_signals
from appliance.errors import StartupError
from appliance.hardware import Hardware, detect
from appliance.presets import load_preset, presets_dirs
from appliance.queue.jetstream import JetStreamNodeQueue
from appliance.settings import ModelSettings, Settings
from appliance.workers.device import Place
from appliance.workers.engine_process import (
    SOCKET_NAME_BYTES_MAX,
    SOCKET_PATH_BYTES_MAX,
    EngineProcess,
    host_command,
)
from appliance.workers.node import Node, ServedModel
from appliance.workers.raw_texts import RawTexts
from appliance.workers.store import CACHE_FOLDER, KEPT_FOLDER, verified_folder
from appliance.workers.tokenize import Tokenizer
from appliance.workers.vector_space import VectorSpace

RAW_TOKENS_MAX = 16_384  # of a text that a spaCy model reads, where its facts say nothing: 65,536 characters


@click.command("worker")
@config_option
def worker_command(config_file: Path | None) -> None:
    """Run a worker node; needs `nats.url`."""
    with startup_errors():
        settings = prepare(config_file, part="worker")
        require_nats(settings)
        hardware = detect(settings.worker.device, environ=os.environ)
        models = [served_model(model, settings, hardware=hardware) for model in settings.models]
        with sockets_dir(Path(settings.state_dir, "run").absolute()) as folder:
            run(_serve(settings, models=models, hardware=hardware, sockets_dir=folder))


async def _serve(settings: Settings, *, models: list[ServedModel], hardware: Hardware, sockets_dir: Path) -> None:
    stop = stop_signals()
    worker = settings.worker
    if worker.metrics_port:
        start_http_server(worker.metrics_port, addr=worker.metrics_host)

    async with JetStreamNodeQueue(settings.nats, settings.queue) as queue:
        node = Node(
            queue,
            models=models,
            places=_places(settings, models, hardware=hardware, sockets_dir=sockets_dir),
            worker=worker,
            settings=settings.queue,
        )
        await node.run(stop)


def _places(settings: Settings, models: Sequence[ServedModel], *, hardware: Hardware, sockets_dir: Path) -> list[Place]:
    """An engine per GPU, or as many on the CPU as its cores allow at the threads that suit the models."""
    worker = settings.worker
    cores = len(os.sched_getaffinity(0))
    threads = min(cores, worker.engine_threads or max(model.preset.tuning.engine_threads for model in models) or cores)
    if hardware.devices == ("cpu",):
        places = [(f"cpu/{number}", "cpu") for number in range(worker.engines or max(1, cores // threads))]
    else:
        places = [(device, device) for device in hardware.devices]

    def engine_of(name: str) -> EngineProcess:
        return EngineProcess(
            host_command(worker.engine, threads=threads),
            name=f"{worker.engine} on {name}",
            sockets_dir=sockets_dir,
            start_timeout_s=worker.engine_start_s,
            batch_timeout_s=worker.batch_timeout_s,
        )

    return [Place(name, device, threads, partial(engine_of, name)) for name, device in places]


@contextlib.contextmanager
def sockets_dir(wanted: Path) -> Iterator[Path]:
    """`wanted`, made if need be; a folder in the system's temporary one where its path is too long for a socket."""
    if len(os.fsencode(wanted)) + SOCKET_NAME_BYTES_MAX <= SOCKET_PATH_BYTES_MAX:
        wanted.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield wanted
    else:
        with tempfile.TemporaryDirectory(prefix="appliance-") as folder:
            yield Path(folder)


def served_model(model: ModelSettings, settings: Settings, *, hardware: Hardware) -> ServedModel:
    """Find the model's preset and files, and verify them. Blocks; a hub model is downloaded on its first start."""
    preset = load_preset(model, hardware=hardware.kind, presets_dirs=presets_dirs(settings.presets_dir))
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
