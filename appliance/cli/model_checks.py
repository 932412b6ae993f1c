"""What the doctor asks of the models that a machine is to serve: their files, and their engines' memory."""

from collections.abc import Callable, Sequence

from appliance.cli.checks import EngineNeed, Finding, gib
from appliance.cli.plan import PlannedModel, encoder_engines, plan_model
from appliance.errors import StartupError
from appliance.hardware import Hardware
from appliance.presets import GenerationTuning
from appliance.settings import ModelSettings, Settings, WorkerSettings
from appliance.workers.engines.packed.config import cached_numbers, read_decoder
from appliance.workers.engines.packed.unsupported import Unsupported
from appliance.workers.store import other_ways, verify_listed


def check_model(
    model: ModelSettings, *, settings: Settings, hardware: Hardware, hub: Callable[[], str]
) -> tuple[Finding, PlannedModel | None]:
    """The model can be served, and its files are here and sound. `hub` says why the hub cannot be reached, or ""."""
    name = "model"
    try:
        planned = plan_model(model, settings, hardware=hardware)
        facts, folder = planned.preset.facts, planned.folder
        if folder is None:
            detail, ways = f"{model.name} is not on this machine", other_ways(facts)
            if problem := hub():
                return Finding(name, "fail", f"{detail}, and the hub is out of reach: {problem}", ways), planned
            return Finding(name, "warn", detail, f"let the first start download it from the hub, or {ways}"), planned
        verified = verify_listed(folder, facts)
    except StartupError as exc:
        return Finding(name, "fail", exc.message, "correct its [[models]] table, its preset or its files"), None
    digests = f"{verified} digests match" if verified else "no digests to compare"
    detail = f"{model.name}: {gib(planned.weights.bytes)}, {digests}, in {folder}"
    if planned.generation is not None:
        detail += f"; {written_by(planned.generation)}"
    if planned.warning:
        return Finding(name, "warn", detail, planned.warning), planned
    return Finding(name, "ok", detail), planned


def written_by(generation: GenerationTuning) -> str:
    """How a model's texts are written, for people."""
    runtime = {"embedded": "the embedded generator", "sglang": "SGLang"}[generation.runtime]
    return (
        f"written by {runtime}, {generation.sequences_max} texts at once, each of up to "
        f"{generation.sequence_tokens_max} tokens with its prompt"
    )


def engine_needs(
    worker: WorkerSettings, planned: Sequence[PlannedModel], *, hardware: Hardware, cores: int
) -> list[EngineNeed]:
    """What each engine process holds: one that encodes all models that are, one that writes a single one."""
    encoding = [each for each in planned if each.generation is None]
    needs: list[EngineNeed] = []
    if encoding:
        presets = [each.preset for each in encoding]
        places, _ = encoder_engines(worker, presets, hardware=hardware, cores=cores)
        needs += [EngineNeed(sum(map(_weights_bytes, encoding)))] * len(places)
    for each in planned:
        if each.generation is not None:
            needs += [EngineNeed(_weights_bytes(each), _cache_bytes(each))] * len(hardware.devices)
    return needs


def _weights_bytes(planned: PlannedModel) -> int:
    return planned.weights.numbers * _number_bytes(planned) or planned.weights.bytes


def _cache_bytes(planned: PlannedModel) -> int:
    """0 of SGLang, which takes a share of the GPU, and of a model whose files are not here yet."""
    generation = planned.generation
    if generation is None or generation.runtime != "embedded" or planned.loadable is None:
        return 0
    try:
        settings = read_decoder(planned.loadable)
    except (Unsupported, ValueError):
        return 0  # the fake engine takes any model
    tokens = generation.sequences_max * min(generation.sequence_tokens_max, settings.max_position_embeddings)
    return cached_numbers(settings) * tokens * _number_bytes(planned)


def _number_bytes(planned: PlannedModel) -> int:
    return 4 if planned.preset.tuning.dtype == "float32" else 2
