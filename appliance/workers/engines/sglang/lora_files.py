"""What a LoRA adapter's files say, held against the model's before SGLang sees them. Blocks on the disk.

SGLang takes an adapter's tensors as they are, and looks at their names and shapes when the first text needs them: where
they do not fit its model, the whole server ends, and with it every text. Settings that it does not know it ignores,
which makes other numbers of the same weights.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from appliance.errors import StartupError
from appliance.workers.weights import shapes_of

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
_CONFIG_BYTES_MAX: Final = 1_000_000
_NAME: Final = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])\.weight")
# SGLang makes one projection of these: a module's change comes with those of its neighbours, where the model has them.
_TOGETHER: Final = {
    "k_proj": ("q_proj", "v_proj"),
    "q_proj": ("v_proj",),
    "v_proj": ("q_proj",),
    "up_proj": ("gate_proj",),
}

Shapes = Mapping[str, tuple[int, ...]]


class _Config(msgspec.Struct, frozen=True):
    """PEFT's, as far as it changes what the weights mean."""

    peft_type: str
    r: Annotated[int, Meta(ge=1)]
    lora_alpha: float
    target_modules: list[str]
    bias: str = "none"
    use_dora: bool | None = None
    use_rslora: bool | None = None
    lora_bias: bool | None = None
    fan_in_fan_out: bool | None = None
    rank_pattern: dict[str, Any] | None = None  # `Any`: JSON; these two and the next may only be empty
    alpha_pattern: dict[str, Any] | None = None
    modules_to_save: list[str] | None = None


def check_lora(folder: Path, *, base: Path, rank_max: int) -> None:
    """Raises ValueError, with words for a client, for an adapter that SGLang cannot run on the model in `base`."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ValueError(f"the adapter's folder has no {name}")
    others = sorted(path.name for path in folder.glob("*.safetensors") if path.name != WEIGHTS)
    if others:
        raise ValueError(f"the adapter's folder has {others[0]!r} beside {WEIGHTS}; SGLang would read both")
    config = _config(folder / CONFIG)
    check_config(config, rank_max=rank_max)
    try:
        weights = shapes_of(folder / WEIGHTS)
        model = {name: shape for path in base.glob("*.safetensors") for name, shape in shapes_of(path).items()}
    except StartupError as exc:
        raise ValueError(exc.message) from exc
    check_shapes(weights, model=model, rank=config.r, targets=config.target_modules)


def _config(path: Path) -> _Config:
    try:
        if path.stat().st_size > _CONFIG_BYTES_MAX:
            raise ValueError(f"{CONFIG} has {path.stat().st_size} B, the limit is {_CONFIG_BYTES_MAX}")
        return msgspec.json.decode(path.read_bytes(), type=_Config)
    except OSError as exc:
        raise ValueError(f"{CONFIG} cannot be read: {exc.strerror}") from exc
    except msgspec.DecodeError as exc:
        raise ValueError(f"{CONFIG} is not one of a LoRA adapter: {exc}") from exc


def check_config(config: _Config, *, rank_max: int) -> None:
    """Raises ValueError for a setting that SGLang refuses or ignores."""
    if config.peft_type != "LORA":
        raise ValueError(f"{CONFIG} has the peft_type {config.peft_type[:40]!r}; it must be 'LORA'")
    if config.r > rank_max:
        raise ValueError(f"the adapter has the rank {config.r}, the preset's max-lora-rank is {rank_max}")
    if config.bias != "none":
        raise ValueError(f"{CONFIG} has the bias {config.bias[:40]!r}; it must be 'none'")
    for name in (
        "use_dora",
        "use_rslora",
        "lora_bias",
        "fan_in_fan_out",
        "rank_pattern",
        "alpha_pattern",
        "modules_to_save",
    ):
        if getattr(config, name):
            raise ValueError(f"{CONFIG} sets {name}, which SGLang does not serve; train the adapter without it")


def check_shapes(weights: Shapes, *, model: Shapes, rank: int, targets: list[str]) -> None:
    """Raises ValueError for tensors that are not the two halves, of this rank, of changes to the model's modules."""
    modules: dict[str, set[str]] = {}
    for name, shape in weights.items():
        found = _NAME.fullmatch(name)
        if found is None:
            raise ValueError(f"{WEIGHTS} has the tensor {name[:120]!r}; only lora_A and lora_B of modules are taken")
        module, side = found["module"], found["side"]
        if not any(module == target or module.endswith(f".{target}") for target in targets):
            raise ValueError(f"{WEIGHTS} changes {module[:120]!r}, which is none of the config's target_modules")
        _check_shape(name, shape, side=side, rank=rank, whole=_whole(module, model))
        modules.setdefault(module, set()).add(side)
    if not modules:
        raise ValueError(f"{WEIGHTS} has no tensors")
    for module, sides in modules.items():
        if len(sides) < 2:
            raise ValueError(f"{WEIGHTS} has lora_{min(sides)} of {module[:120]!r} and not the other half")
        parent, _, leaf = module.rpartition(".")
        for neighbour in _TOGETHER.get(leaf, ()):
            if f"{parent}.{neighbour}" not in modules and _is_there(f"{parent}.{neighbour}", model):
                raise ValueError(f"the adapter changes {module[:120]!r} without {neighbour}; SGLang takes both or none")


def _whole(module: str, model: Shapes) -> tuple[int, ...] | None:
    """The shape of the module's own weight; None for one that is stored otherwise. Raises ValueError without it."""
    if not _is_there(module, model):
        raise ValueError(f"the adapter changes {module[:120]!r}, which the model has not: it is one of another model")
    return model.get(f"{module}.weight")


def _is_there(module: str, model: Shapes) -> bool:
    return f"{module}.weight" in model or any(name.startswith(f"{module}.") for name in model)


def _check_shape(name: str, shape: tuple[int, ...], *, side: str, rank: int, whole: tuple[int, ...] | None) -> None:
    if len(shape) != 2 or shape[side == "B"] != rank:
        raise ValueError(f"the tensor {name[:120]!r} has the shape {list(shape)}, its config the rank {rank}")
    if whole is None or len(whole) != 2:
        return
    wanted = [rank, whole[1]] if side == "A" else [whole[0], rank]
    if list(shape) != wanted:
        raise ValueError(f"the tensor {name[:120]!r} has the shape {list(shape)}, the model needs {wanted}")
