"""What this machine is to serve, and all that can be said to be wrong with it before anything is started.

`appliance up`, `worker`, `config check` and `doctor` ask here, so that what one of them calls valid the others start.
Reads settings, presets, and of a model's files the small ones; no weights, and nothing of the network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from appliance.cli.startup import Role, catalog_of, require_nats
from appliance.errors import StartupError
from appliance.hardware import Hardware, detect
from appliance.presets import GenerationTuning, Preset, load_preset, presets_dirs
from appliance.settings import ModelSettings, Settings, WorkerSettings
from appliance.workers import model_files
from appliance.workers.engine_task import engine_task
from appliance.workers.engines.packed.config import check_causal
from appliance.workers.engines.packed.unsupported import Unsupported
from appliance.workers.engines.sglang.environment import Environment, has_adapter_client
from appliance.workers.engines.sglang.flags import checked
from appliance.workers.engines.sglang.launch import check_device
from appliance.workers.store import CACHE_FOLDER, check_files, find, loadable
from appliance.workers.weights import NO_WEIGHTS, Weights
from appliance.workers.writing.chat_template import ChatTemplate

TOKENIZER_NAME: Final = "tokenizer.json"


@dataclass(frozen=True)
class PlannedModel:
    """One of `settings.models`, as it will be served here."""

    settings: ModelSettings
    preset: Preset  # what is in effect
    folder: Path | None = None  # where its files lie; None: the first start asks the hub
    loadable: Path | None = None  # what an engine loads, where that is here: GGUF is converted by the first start
    weights: Weights = NO_WEIGHTS
    warning: str = ""  # for a person

    @property
    def generation(self) -> GenerationTuning | None:
        """How it writes texts; None of a model that does other things."""
        return self.preset.tuning.generation if "generate" in self.preset.facts.tasks else None


def check_start(settings: Settings, *, role: Role, environ: Mapping[str, str]) -> tuple[str, ...]:
    """Raises `StartupError` for what would keep `appliance <role>` from starting; returns warnings for a person.

    Blocks on nvidia-smi, see `detect`.
    """
    if role != "up":
        require_nats(settings)
    if role != "worker":
        catalog_of(settings)
    if role == "gateway":
        return ()
    models = plan_models(settings, hardware=detect(settings.worker.device, environ=environ))
    return tuple(model.warning for model in models if model.warning)


def plan_models(settings: Settings, *, hardware: Hardware) -> tuple[PlannedModel, ...]:
    """All of `settings.models`, in order. Raises `StartupError` for the first that cannot be served."""
    return tuple(plan_model(model, settings, hardware=hardware) for model in settings.models)


def plan_model(model: ModelSettings, settings: Settings, *, hardware: Hardware) -> PlannedModel:
    """One of them. Raises `StartupError`."""
    preset, warning = _in_effect(model, settings, hardware=hardware)
    cache_dir = Path(settings.state_dir, CACHE_FOLDER)
    folder = find(preset.facts, model, cache_dir=cache_dir)
    if folder is None:
        return PlannedModel(model, preset, warning=warning)
    weights = check_files(folder, preset.facts)
    ready = loadable(folder, preset.facts, cache_dir=cache_dir)
    if ready is not None and ready != folder:
        weights = check_files(ready, preset.facts)
    planned = PlannedModel(model, preset, folder, ready, weights, warning)
    if settings.worker.engine != "fake":
        _check_task(planned)
        _check_family(planned)
    return planned


def encoder_engines(
    worker: WorkerSettings, presets: Sequence[Preset], *, hardware: Hardware, cores: int
) -> tuple[list[tuple[str, str]], int]:
    """The name and device of each engine that encodes, all models in each, and the threads of one on a CPU.

    An engine a GPU, or as many on the CPU as its cores allow at the threads that suit the models.
    """
    threads = min(cores, worker.engine_threads or max(preset.tuning.engine_threads for preset in presets) or cores)
    if hardware.devices != ("cpu",):
        return [(device, device) for device in hardware.devices], threads
    return [(f"cpu/{number}", "cpu") for number in range(worker.engines or max(1, cores // threads))], threads


def _in_effect(model: ModelSettings, settings: Settings, *, hardware: Hardware) -> tuple[Preset, str]:
    """The model's preset, with a runtime that is there, and what to say of that.

    Where SGLang is not installed, a preset that names it, as those of GPUs do, gives way to what a CPU takes. What the
    operator asks for does not.
    """
    directories = presets_dirs(settings.presets_dir)
    preset = load_preset(model, hardware=hardware.kind, presets_dirs=directories)
    if engine_task(preset.facts) != "generate":
        return preset, ""
    generation = preset.tuning.generation
    if generation is None:
        raise StartupError(f"the tuning of {model.name} has no [generation]; add it, as presets/default has it")
    installed = Environment.of(settings.state_dir).state() == "ready"
    if generation.runtime == "embedded" or installed:
        _check_runtime(generation, model.name, settings, device=hardware.devices[0])
        return preset, ""
    own = model.tuning.get("generation", {})
    is_wanted = own.get("runtime") == "sglang" or "flags" in own
    general = None if is_wanted else load_preset(model, hardware="cpu", presets_dirs=directories).tuning.generation
    if general is None or general.runtime == "sglang":
        raise StartupError(
            f"the tuning of {model.name} asks for SGLang, which is not installed; run `appliance engines install "
            'sglang`, or give it a [generation] whose runtime is "embedded"'
        )
    warning = (
        f"SGLang is not installed: {model.name} is written by the embedded generator, {general.sequences_max} texts at "
        "once; `appliance engines install sglang` serves many more"
    )
    tuning = msgspec.structs.replace(preset.tuning, generation=general)
    return msgspec.structs.replace(preset, tuning=tuning), warning


def _check_runtime(generation: GenerationTuning, name: str, settings: Settings, *, device: str) -> None:
    """The runtime can be started with these flags, as far as can be said without starting it."""
    if generation.runtime == "embedded":
        if generation.flags:
            raise StartupError(f"the tuning of {name}: generation.flags are SGLang's; the embedded generator has none")
        return
    if not has_adapter_client():
        raise StartupError(
            f"{name} is written by SGLang, and aiohttp, which asks it, is missing here; `pip install "
            "'appliance[sglang]'`"
        )
    installed = Environment.of(settings.state_dir).installed()
    try:
        checked(generation.flags)
        if installed is not None:
            check_device(device, installed.kind)
    except ValueError as exc:
        raise StartupError(f"the tuning of {name}: {exc}") from exc


def _check_task(planned: PlannedModel) -> None:
    """The folder has what its task wants: what writes has a template that can be read, and nothing else chats."""
    folder, facts = planned.loadable, planned.preset.facts
    if folder is None or facts.runtime == "spacy":
        return
    try:
        template = ChatTemplate.load(folder)
        if planned.generation is None and template is not None and model_files.is_for_texts(folder):
            raise ValueError('it holds a model that writes texts; give it `facts = { tasks = ["generate"] }`')
        is_embedded = planned.generation is not None and planned.generation.runtime == "embedded"
        if is_embedded and not (folder / TOKENIZER_NAME).is_file():
            raise ValueError(f"it has no {TOKENIZER_NAME}")
    except ValueError as exc:
        raise StartupError(f"the folder of {planned.settings.name} cannot be served: {exc}") from exc


def _check_family(planned: PlannedModel) -> None:
    """SGLang, which knows other families, says so itself."""
    generation = planned.generation
    if planned.loadable is None or generation is None or generation.runtime != "embedded":
        return
    try:
        check_causal(planned.loadable)
    except (Unsupported, ValueError) as exc:
        raise StartupError(f"the embedded generator cannot run {planned.settings.name}: {exc}; SGLang may") from exc
