"""config.json of the families that are served without padding.

Every field that changes a vector is either required or has one default in all versions of its family. What transformers
knows and the packed stack does not is `Unsupported`.
"""

from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec

from appliance.workers.engines.packed.unsupported import Unsupported

_T = TypeVar("_T")

CAUSAL: Final = ("llama", "mistral", "qwen2", "qwen3")  # the families of decoders.py


class Bert(msgspec.Struct, frozen=True):
    """bert, roberta, xlm-roberta, mpnet"""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    layer_norm_eps: float
    max_position_embeddings: int
    type_vocab_size: int = 0  # mpnet has none
    pad_token_id: int | None = None
    relative_attention_num_buckets: int = 32


class NomicBert(msgspec.Struct, frozen=True):
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    layer_norm_eps: float
    max_position_embeddings: int
    type_vocab_size: int
    rope_parameters: dict[str, object]
    head_dim: int | None = None


class ModernBert(msgspec.Struct, frozen=True):
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_activation: str
    norm_eps: float
    max_position_embeddings: int
    local_attention: int
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: list[str] | None = None
    global_attn_every_n_layers: int | None = None
    rope_parameters: dict[str, dict[str, object] | None] | None = None
    rope_scaling: dict[str, object] | None = None
    global_rope_theta: float | None = None
    local_rope_theta: float | None = None
    classifier_pooling: str = "cls"
    classifier_bias: bool = False
    classifier_activation: str = "gelu"


class Decoder(msgspec.Struct, frozen=True):
    """llama, mistral, qwen2, qwen3"""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    rms_norm_eps: float
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None
    layer_types: list[str] | None = None
    rope_theta: float | None = None
    rope_scaling: dict[str, object] | None = None
    rope_parameters: dict[str, object] | None = None
    tie_word_embeddings: bool = False


class Stretch(msgspec.Struct, frozen=True):
    """How Llama 3.1 reaches further than it was first trained: rotations too slow for that are slowed by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


class Rope(NamedTuple):
    """Rotary positions of a decoder."""

    theta: float
    stretch: Stretch | None


class _Any(msgspec.Struct, frozen=True):
    """What would make any model another one."""

    model_type: str = ""
    position_embedding_type: str | None = None
    is_decoder: bool = False
    add_cross_attention: bool = False
    is_causal: bool | None = None
    use_bidirectional_attention: bool | None = None
    quantization_config: dict[str, object] | None = None
    pruned_heads: dict[str, object] | None = None
    embedding_size: int | None = None


def read_model_type(folder: Path) -> str:
    """The family's name. Raises `Unsupported` for settings that no packed stack implements."""
    config = _decode(folder, _Any)
    for is_other, what in (
        (config.position_embedding_type not in {None, "absolute"}, "position_embedding_type"),
        (config.is_decoder, "is_decoder"),
        (config.add_cross_attention, "add_cross_attention"),
        (config.is_causal is not None, "is_causal"),
        (config.use_bidirectional_attention is not None, "use_bidirectional_attention"),
        (bool(config.quantization_config), "quantization_config"),
        (bool(config.pruned_heads), "pruned_heads"),
        (config.embedding_size is not None, "embedding_size"),
    ):
        if is_other:
            raise Unsupported(f"config.json sets {what}")
    return config.model_type


def check_causal(folder: Path) -> str:
    """The family of a causal model. Raises `Unsupported` for one that decoders.py does not build."""
    kind = read_model_type(folder)
    if kind not in CAUSAL:
        raise Unsupported(f"its model_type is {kind!r}, and known are {', '.join(CAUSAL)}")
    read_decoder(folder)
    return kind


def read_decoder(folder: Path) -> Decoder:
    """config.json of a causal model. Raises `Unsupported` for one that differs from its family."""
    settings = _decode(folder, Decoder)
    if settings.use_sliding_window or set(settings.layer_types or ()) - {"full_attention"}:
        raise Unsupported("sliding windows in a causal model")
    if settings.mlp_bias:
        raise Unsupported("biases in a gated MLP")
    rope_of(settings)
    return settings


def cached_numbers(settings: Decoder) -> int:
    """How many a sequence's keys and values are, each token."""
    head_dim = settings.head_dim or settings.hidden_size // settings.num_attention_heads
    return 2 * settings.num_hidden_layers * (settings.num_key_value_heads or settings.num_attention_heads) * head_dim


def read(folder: Path, kind: type[_T]) -> _T:
    """config.json as `kind`. Raises `Unsupported` for one that lacks a field."""
    return _decode(folder, kind)


def theta_of(parameters: dict[str, object] | None, *, scaling: dict[str, object] | None = None) -> float | None:
    """`rope_theta` of plain rotary positions, or None. Raises `Unsupported` for scaled ones (YaRN and others)."""
    for settings in (parameters or {}, scaling or {}):
        kind = settings.get("rope_type", settings.get("type", "default"))
        if kind != "default" or "partial_rotary_factor" in settings:
            raise Unsupported(f"rotary positions of the kind {kind!r}")
    theta = (parameters or {}).get("rope_theta")
    return float(theta) if isinstance(theta, int | float) else None


def rope_of(settings: Decoder) -> Rope:
    """Raises `Unsupported` for positions of another kind than plain ones and Llama 3.1's."""
    stated = settings.rope_parameters or {}
    scaling = settings.rope_scaling or stated
    stretch = None
    if scaling.get("rope_type", scaling.get("type")) == "llama3" and "partial_rotary_factor" not in stated:
        try:
            stretch = msgspec.convert(scaling, Stretch)
        except msgspec.ValidationError as exc:
            raise Unsupported(f"config.json: rope_scaling: {exc}") from exc
    else:
        theta_of(settings.rope_parameters, scaling=settings.rope_scaling)
    theta = stated.get("rope_theta", settings.rope_theta)
    if not isinstance(theta, int | float):
        raise Unsupported("config.json states no rope_theta")
    return Rope(float(theta), stretch)


def _decode(folder: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode((folder / "config.json").read_bytes(), type=kind)
    except OSError as exc:
        raise ValueError(f"config.json cannot be read: {exc.strerror}") from exc
    except msgspec.ValidationError as exc:
        raise Unsupported(f"config.json: {exc}") from exc
    except msgspec.DecodeError as exc:
        raise ValueError(f"config.json cannot be read: {exc}") from exc
