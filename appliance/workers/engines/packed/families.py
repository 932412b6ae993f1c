"""config.json and safetensors of each supported family → a `Stack`.

    bert (MiniLM, E5, BGE, GTE)        learned positions, normalized after each sum
    roberta, xlm-roberta (BGE-M3)      the same, positions counted from pad_token_id + 1
    mpnet                              the same from 2, and a bias by relative distance
    nomic_bert                         rotary positions, SwiGLU
    modernbert                         rotary positions, GeGLU, normalized before each block, local and global layers
    qwen3 (Qwen3-Embedding)            causal, rotary positions, grouped queries, normalized queries and keys

Each was checked against transformers 5.24's own modules; `tests/e2e/test_packed.py` holds them together.
"""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple, TypedDict

import torch

from appliance.workers.engines.packed import config
from appliance.workers.engines.packed.decoders import DECODERS
from appliance.workers.engines.packed.linear import Linear
from appliance.workers.engines.packed.masks import (
    CPU_KEYS_MULTIPLE,
    BiasMasks,
    FullMasks,
    WindowMasks,
)
from appliance.workers.engines.packed.parts import gated, joined, layer_norm, linear, rotary_of, size_of_head
from appliance.workers.engines.packed.stack import (
    Embedding,
    GatedMlp,
    LayerNorm,
    Mlp,
    PostNormLayer,
    PreNormLayer,
    SelfAttention,
    Stack,
    View,
)
from appliance.workers.engines.packed.unsupported import Unsupported
from appliance.workers.engines.packed.weights import Weights

EVERYWHERE: Final = (-1, -1)
_MPNET_BUCKETS: Final = 32
_MPNET_DISTANCE_MAX: Final = 128
_MPNET_PAD_ID: Final = 1  # whatever config.json says


class Family(NamedTuple):
    """How to read one architecture."""

    prefix: str  # of the encoder's weights in a checkpoint that has a head
    build: Callable[[Path, Weights], Stack]
    rename: Callable[[str], str]


def family_of(folder: Path) -> Family:
    """The family of the model whose config.json lies in `folder`. Raises `Unsupported` for any other."""
    model_type = config.read_model_type(folder)
    if model_type not in _FAMILIES:
        raise Unsupported(f"model_type {model_type!r}")
    return _FAMILIES[model_type]


def keys_multiple(device: str) -> int:
    """In what multiples a text's keys are read there."""
    return CPU_KEYS_MULTIPLE if device == "cpu" else 1


def _bert(folder: Path, weights: Weights) -> Stack:
    settings = config.read(folder, config.Bert)
    masks = FullMasks(**_on(weights), positions_max=settings.max_position_embeddings)
    return _bert_stack(settings, weights, View(masks, varlen_window=EVERYWHERE))


def _roberta(folder: Path, weights: Weights) -> Stack:
    settings = config.read(folder, config.Bert)
    pad_id = settings.pad_token_id
    if pad_id is None:
        raise Unsupported("config.json states no pad_token_id")
    masks = FullMasks(**_on(weights), positions_max=settings.max_position_embeddings)
    view = View(masks, varlen_window=EVERYWHERE)
    return _bert_stack(settings, weights, view, pad_id=pad_id)


def _bert_stack(settings: config.Bert, weights: Weights, view: View, *, pad_id: int | None = None) -> Stack:
    width = settings.hidden_size
    types = weights.take("embeddings.token_type_embeddings.weight", settings.type_vocab_size, width).float()
    positions = weights.take("embeddings.position_embeddings.weight", settings.max_position_embeddings, width).float()
    embedding = Embedding(
        weights.take("embeddings.word_embeddings.weight", settings.vocab_size, width),
        (positions + types[0]).to(weights.dtype),
        (types[:2] - types[0]).to(weights.dtype) if len(types) > 1 else None,
        layer_norm(weights, "embeddings.LayerNorm", width, settings.layer_norm_eps),
    )
    names = {"q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value"}
    layers = [
        _bert_layer(settings, weights, f"encoder.layer.{number}", names | {"out": "attention.output.dense"})
        for number in range(settings.num_hidden_layers)
    ]
    return Stack(embedding, [view], layers, None, first_position=0 if pad_id is None else pad_id + 1, pad_id=pad_id)


def _bert_layer(settings: config.Bert, weights: Weights, name: str, names: dict[str, str]) -> PostNormLayer:
    width, inner = settings.hidden_size, settings.intermediate_size
    head_dim = size_of_head(width, settings.num_attention_heads)
    epsilon = settings.layer_norm_eps
    sizes = [width, width, width]
    attention = SelfAttention(
        joined(weights, [f"{name}.{names[part]}" for part in "qkv"], sizes, width, has_bias=True),
        linear(weights, f"{name}.{names['out']}", width, width),
        settings.num_attention_heads,
        settings.num_attention_heads,
        head_dim,
    )
    norm = names.get("norm", "attention.output.LayerNorm")
    return PostNormLayer(
        attention,
        layer_norm(weights, f"{name}.{norm}", width, epsilon),
        Mlp(
            linear(weights, f"{name}.intermediate.dense", inner, width, activation=settings.hidden_act),
            linear(weights, f"{name}.output.dense", width, inner),
        ),
        layer_norm(weights, f"{name}.output.LayerNorm", width, epsilon),
    )


def _mpnet(folder: Path, weights: Weights) -> Stack:
    settings = config.read(folder, config.Bert)
    if settings.relative_attention_num_buckets != _MPNET_BUCKETS:
        raise Unsupported(f"relative_attention_num_buckets {settings.relative_attention_num_buckets}")
    width = settings.hidden_size
    bias = weights.take("encoder.relative_attention_bias.weight", _MPNET_BUCKETS, settings.num_attention_heads)
    distances = torch.arange(-_MPNET_DISTANCE_MAX, _MPNET_DISTANCE_MAX + 1)
    by_distance = bias[_mpnet_bucket(distances).to(bias.device)].T.contiguous()
    embedding = Embedding(
        weights.take("embeddings.word_embeddings.weight", settings.vocab_size, width),
        weights.take("embeddings.position_embeddings.weight", settings.max_position_embeddings, width),
        None,
        layer_norm(weights, "embeddings.LayerNorm", width, settings.layer_norm_eps),
    )
    names = {part: f"attention.attn.{part}" for part in "qkv"}
    names |= {"out": "attention.attn.o", "norm": "attention.LayerNorm"}
    layers = [
        _bert_layer(settings, weights, f"encoder.layer.{number}", names) for number in range(settings.num_hidden_layers)
    ]
    view = View(BiasMasks(by_distance, keys_multiple=keys_multiple(weights.device)))
    return Stack(embedding, [view], layers, None, first_position=_MPNET_PAD_ID + 1, pad_id=_MPNET_PAD_ID)


def _mpnet_bucket(distance: torch.Tensor) -> torch.Tensor:
    """The bias bucket of a key that stands `distance` after its query: exact when near, logarithmic beyond (T5)."""
    half = _MPNET_BUCKETS // 2
    exact = half // 2
    away = distance.abs()
    growth = torch.log(away.clamp(min=1).float() / exact) / math.log(_MPNET_DISTANCE_MAX / exact)
    far = (exact + (growth * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(away < exact, away, far) + torch.where(distance > 0, half, 0)


def _nomic_bert(folder: Path, weights: Weights) -> Stack:
    settings = config.read(folder, config.NomicBert)
    width, inner, heads = settings.hidden_size, settings.intermediate_size, settings.num_attention_heads
    head_dim = settings.head_dim or size_of_head(width, heads)
    theta = config.theta_of(settings.rope_parameters)
    if theta is None:
        raise Unsupported("config.json states no rope_theta")
    epsilon = settings.layer_norm_eps
    types = weights.take("embeddings.token_type_embeddings.weight", settings.type_vocab_size, width).float()
    words = weights.take("embeddings.word_embeddings.weight", settings.vocab_size, width)
    embedding = Embedding(
        (words.float() + types[0]).to(weights.dtype),
        None,
        (types[:2] - types[0]).to(weights.dtype) if len(types) > 1 else None,
        layer_norm(weights, "embeddings.LayerNorm", width, epsilon),
    )
    layers = []
    for number in range(settings.num_hidden_layers):
        name = f"layers.{number}"
        size = heads * head_dim
        if weights.has(f"{name}.attn.Wqkv.weight"):  # how the authors' checkpoints have it
            qkv = linear(weights, f"{name}.attn.Wqkv", 3 * size, width, has_bias=False)
        else:
            names = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
            qkv = joined(weights, names, [size] * 3, width, has_bias=False)
        out = linear(weights, f"{name}.self_attn.o_proj", width, size, has_bias=False)
        layers.append(
            PostNormLayer(
                SelfAttention(qkv, out, heads, heads, head_dim),
                layer_norm(weights, f"{name}.post_attention_layernorm", width, epsilon),
                gated(weights, f"{name}.mlp", width, inner, settings.hidden_act),
                layer_norm(weights, f"{name}.post_mlp_layernorm", width, epsilon),
            )
        )
    masks = FullMasks(**_on(weights), positions_max=settings.max_position_embeddings)
    rotary = rotary_of(weights, head_dim, theta, settings.max_position_embeddings)
    return Stack(embedding, [View(masks, rotary=rotary, varlen_window=EVERYWHERE)], layers, None)


def _modernbert(folder: Path, weights: Weights) -> Stack:
    settings = config.read(folder, config.ModernBert)
    width, heads = settings.hidden_size, settings.num_attention_heads
    head_dim = size_of_head(width, heads)

    def norm(name: str) -> LayerNorm:
        return layer_norm(weights, name, width, settings.norm_eps, has_bias=settings.norm_bias)

    embedding = Embedding(
        weights.take("embeddings.tok_embeddings.weight", settings.vocab_size, width),
        None,
        None,
        norm("embeddings.norm"),
    )
    layers = []
    for number, view in enumerate(_modernbert_views(settings)):
        name = f"layers.{number}"
        has_bias = settings.attention_bias
        attention = SelfAttention(
            linear(weights, f"{name}.attn.Wqkv", 3 * width, width, has_bias=has_bias),
            linear(weights, f"{name}.attn.Wo", width, width, has_bias=has_bias),
            heads,
            heads,
            head_dim,
        )
        mlp = _geglu(weights, f"{name}.mlp", settings)
        before = norm(f"{name}.attn_norm") if number > 0 else None
        layers.append(PreNormLayer(before, attention, norm(f"{name}.mlp_norm"), mlp, view))
    window = settings.local_attention // 2
    positions = settings.max_position_embeddings
    everywhere, nearby = _modernbert_thetas(settings)
    views = [
        View(
            FullMasks(**_on(weights), positions_max=positions),
            rotary=rotary_of(weights, head_dim, everywhere, positions),
            varlen_window=EVERYWHERE,
        ),
        View(
            WindowMasks(**_on(weights), window=window),
            rotary=rotary_of(weights, head_dim, nearby, positions),
            varlen_window=(window, window),
        ),
    ]
    return Stack(embedding, views, layers, norm("final_norm"))


def _modernbert_views(settings: config.ModernBert) -> list[int]:
    """0 for a layer that sees all of a text, 1 for one that sees a window of it."""
    names = settings.layer_types
    if names is None:
        every = 3 if settings.global_attn_every_n_layers is None else settings.global_attn_every_n_layers
        return [int(number % every != 0) for number in range(settings.num_hidden_layers)]
    known = {"full_attention": 0, "sliding_attention": 1}
    if len(names) != settings.num_hidden_layers or not known.keys() >= set(names):
        raise Unsupported("config.json has other layer_types than full_attention and sliding_attention, one a layer")
    return [known[name] for name in names]


def _modernbert_thetas(settings: config.ModernBert) -> tuple[float, float]:
    """RoPE's theta of the global and of the local layers."""
    parameters = settings.rope_parameters or {}
    everywhere = config.theta_of(parameters.get("full_attention"), scaling=settings.rope_scaling)
    nearby = config.theta_of(parameters.get("sliding_attention"), scaling=settings.rope_scaling)
    everywhere = settings.global_rope_theta if everywhere is None else everywhere
    nearby = settings.local_rope_theta if nearby is None else nearby
    if everywhere is None or nearby is None:
        raise Unsupported("config.json does not state both rope_theta values")
    return everywhere, nearby


def _geglu(weights: Weights, name: str, settings: config.ModernBert) -> GatedMlp:
    width, inner = settings.hidden_size, settings.intermediate_size
    both = weights.take(f"{name}.Wi.weight", 2 * inner, width)
    bias = weights.take_bias(f"{name}.Wi.bias", 2 * inner, is_used=settings.mlp_bias)
    gate_bias, up_bias = (None, None) if bias is None else (bias[:inner].clone(), bias[inner:].clone())
    return GatedMlp(
        Linear(both[:inner].clone(), gate_bias, activation=settings.hidden_activation),
        Linear(both[inner:].clone(), up_bias),
        linear(weights, f"{name}.Wo", width, inner, has_bias=settings.mlp_bias),
    )


class _Where(TypedDict):
    dtype: torch.dtype
    device: str
    keys_multiple: int


def _on(weights: Weights) -> _Where:
    return {"dtype": weights.dtype, "device": weights.device, "keys_multiple": keys_multiple(weights.device)}


def _old_layer_norm(name: str) -> str:
    """Checkpoints from TensorFlow times name a layer norm's weights by their Greek letters."""
    return re.sub(r"LayerNorm\.(gamma|beta)$", lambda m: f"LayerNorm.{_GREEK[m.group(1)]}", name)


_GREEK = {"gamma": "weight", "beta": "bias"}
# How the authors of nomic_bert name what transformers names otherwise.
_NOMIC_NAMES = (
    ("encoder.layers", "layers"),
    ("emb_ln", "embeddings.LayerNorm"),
    ("attn.out_proj", "self_attn.o_proj"),
    ("fc11", "up_proj"),
    ("fc12", "gate_proj"),
    ("fc2", "down_proj"),
    ("norm1", "post_attention_layernorm"),
    ("norm2", "post_mlp_layernorm"),
)


def nomic_name(name: str) -> str:
    """The name that transformers gives the weight `name` of an authors' checkpoint."""
    for theirs, ours in _NOMIC_NAMES:
        name = name.replace(theirs, ours)
    return name


_FAMILIES: Final = {
    "bert": Family("bert", _bert, _old_layer_norm),
    "roberta": Family("roberta", _roberta, _old_layer_norm),
    "xlm-roberta": Family("roberta", _roberta, _old_layer_norm),
    "mpnet": Family("mpnet", _mpnet, _old_layer_norm),
    "nomic_bert": Family("nomic_bert", _nomic_bert, nomic_name),
    "modernbert": Family("model", _modernbert, lambda name: name),
    "qwen3": Family("model", DECODERS["qwen3"], lambda name: name),
}
