"""What follows the transformer in a sentence-transformers folder: pooling, dense layers, normalization.

A folder without modules.json is pooled by the mean, as sentence-transformers does it. All in float32.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
import torch
from torch.nn import functional

from appliance.workers import model_files
from appliance.workers.engines.packed.pack import Pack
from appliance.workers.engines.packed.pooling import MODES, Mode
from appliance.workers.engines.packed.unsupported import Unsupported
from appliance.workers.engines.packed.weights import Weights

_T = TypeVar("_T")
Step = Callable[[torch.Tensor], torch.Tensor]

# Order matters: it is the order of the concatenation when several are on.
_OLD_MODES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_DENSE_ACTIVATIONS: Final[dict[str, Step]] = {
    "torch.nn.modules.linear.Identity": lambda x: x,
    "torch.nn.modules.activation.Tanh": torch.tanh,
    "torch.nn.modules.activation.ReLU": functional.relu,
    "torch.nn.modules.activation.GELU": functional.gelu,
    "torch.nn.modules.activation.SiLU": functional.silu,
    "torch.nn.modules.activation.Sigmoid": torch.sigmoid,
}
# Keys of sentence_*_config.json that do not change a vector here: lengths and lower-casing are the tokenizer's.
_TRANSFORMER_KEYS: Final = {"max_seq_length", "do_lower_case", "processor_kwargs", "tokenizer_args", "unpad_inputs"}


class _Pooling(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    embedding_dimension: int | None = None
    word_embedding_dimension: int | None = None
    include_prompt: bool = True
    pooling_mode: str | list[str] | None = None
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False


class _Dense(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    in_features: int
    out_features: int
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    module_input_name: str = "sentence_embedding"
    module_output_name: str | None = None
    use_residual: bool = False


class Head:
    """Pooling and the modules after it."""

    def __init__(
        self, modes: Sequence[Mode], steps: Sequence[Step], width: int, weights_bytes: int, *, has_token_vectors: bool
    ) -> None:
        self.width = width
        self.weights_bytes = weights_bytes
        self.is_per_token = False
        # One mode of pooling and no other step but normalization: a text's vector lies among its tokens' vectors.
        self.has_token_vectors = has_token_vectors
        self._modes = modes
        self._steps = steps

    def __call__(self, hidden: torch.Tensor, pack: Pack) -> torch.Tensor:
        """[tokens, model width] → float32 [texts, width]"""
        pooled = [mode(hidden, pack) for mode in self._modes]
        x = pooled[0] if len(pooled) == 1 else torch.cat(pooled, dim=1)
        for step in self._steps:
            x = step(x)
        return x


def load_head(folder: Path, *, token_width: int, device: str) -> Head:
    """Read the modules after the transformer. Raises `Unsupported`, or ValueError for missing weights."""
    modules = model_files.modules(folder)
    if not modules:
        return Head([MODES["mean"]], [], token_width, 0, has_token_vectors=True)
    check_transformer(folder, modules, task="feature-extraction", output="last_hidden_state", name="token_embeddings")
    if len(modules) < 2 or _kind(modules[1]) != "Pooling":
        raise Unsupported("the second module is not Pooling")
    modes = _modes(_json(folder / modules[1].path / "config.json", _Pooling), token_width)
    width, steps, weights_bytes = token_width * len(modes), list[Step](), 0
    for module in modules[2:]:
        match _kind(module):
            case "Normalize":
                steps.append(lambda x: functional.normalize(x, dim=1))
            case "Dense":
                settings = _json(folder / module.path / "config.json", _Dense)
                steps.append(_dense(folder / module.path, settings, width, device))
                weights_bytes += 4 * settings.out_features * (width + settings.bias)
                width = settings.out_features
            case other:
                raise Unsupported(f"the module {other}")
    has_dense = any(_kind(module) == "Dense" for module in modules)
    return Head(modes, steps, width, weights_bytes, has_token_vectors=len(modes) == 1 and not has_dense)


def _kind(module: model_files.ModelModule) -> str:
    return module.type.rsplit(".", 1)[-1]


def check_transformer(
    folder: Path, modules: Sequence[model_files.ModelModule], *, task: str, output: str, name: str
) -> None:
    """Raise `Unsupported` unless the first module is a plain transformer for `task`.

    It gives the model's `output` to what follows it under `name`.
    """
    plain: dict[str, object] = {
        "transformer_task": task,
        "modality_config": {"text": {"method": "forward", "method_output_name": output}},
        "module_output_name": name,
    }
    if modules and _kind(modules[0]) != "Transformer":
        raise Unsupported(f"the first module is {_kind(modules[0])}")
    for path in sorted(model_files.transformer_folder(folder).glob("sentence_*_config.json")):
        for key, value in _json(path, dict[str, object]).items():
            if value and key not in _TRANSFORMER_KEYS and plain.get(key, object()) != value:
                raise Unsupported(f"{path.name} sets {key}")


def _modes(settings: _Pooling, token_width: int) -> list[Mode]:
    if not settings.include_prompt:
        raise Unsupported("the pooling leaves the prompt out (include_prompt=false)")
    stated = settings.embedding_dimension or settings.word_embedding_dimension
    if stated is not None and stated != token_width:
        raise Unsupported(f"the pooling expects {stated} dimensions, the model has {token_width}")
    match settings.pooling_mode:
        case None:
            names = [name for key, name in _OLD_MODES.items() if getattr(settings, key)] or ["mean"]
        case str(name):
            names = [name]
        case names:
            pass
    unknown = [name for name in names if name not in MODES]
    if unknown or not names:
        raise Unsupported(f"the pooling mode {', '.join(unknown)!r}")
    return [MODES[name] for name in names]


def _dense(folder: Path, settings: _Dense, width: int, device: str) -> Step:
    if settings.activation_function not in _DENSE_ACTIVATIONS:
        raise Unsupported(f"the activation {settings.activation_function!r} of a Dense module")
    if settings.use_residual or settings.module_input_name != "sentence_embedding":
        raise Unsupported("a Dense module with a residual or another input")
    if settings.module_output_name not in {None, "sentence_embedding"} or settings.in_features != width:
        raise Unsupported("a Dense module with another output or another width")
    activation = _DENSE_ACTIVATIONS[settings.activation_function]
    weights = Weights(folder, dtype=torch.float32, device=device)
    weight = weights.take("linear.weight", settings.out_features, width)
    bias = weights.take_bias("linear.bias", settings.out_features, is_used=settings.bias)
    return lambda x: activation(functional.linear(x, weight, bias))


def _json(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as exc:
        raise ValueError(f"{path.name} cannot be read: {exc.strerror}") from exc
    except msgspec.ValidationError as exc:
        raise Unsupported(f"{path.name}: {exc}") from exc
    except msgspec.DecodeError as exc:
        raise ValueError(f"{path.name} cannot be read: {exc}") from exc
