"""config.json and safetensors of the causal families → a `Stack`: rotary positions, SwiGLU, RMS norms.

    llama (Llama 2 and 3, SmolLM2)     grouped queries; Llama 3.1 stretches its slow rotations
    mistral                            the same
    qwen2 (Qwen2, Qwen2.5)             with biases of queries, keys and values
    qwen3                              with normalized queries and keys instead

Checked against transformers 5.24's own modules like the encoders.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from appliance.workers.engines.packed import config
from appliance.workers.engines.packed.masks import CPU_KEYS_MULTIPLE, CausalMasks
from appliance.workers.engines.packed.parts import gated, joined, linear
from appliance.workers.engines.packed.rotary import Rotary
from appliance.workers.engines.packed.stack import Embedding, PreNormLayer, RmsNorm, SelfAttention, Stack, View
from appliance.workers.engines.packed.weights import Weights


def decoder(folder: Path, weights: Weights, *, has_qkv_bias: bool = False, has_qk_norm: bool = False) -> Stack:
    """Raises `Unsupported` for a model that differs from its family."""
    settings = config.read_decoder(folder)
    width, inner, heads = settings.hidden_size, settings.intermediate_size, settings.num_attention_heads
    head_dim = settings.head_dim or width // heads
    key_heads = settings.num_key_value_heads or heads
    rope = config.rope_of(settings)

    def norm(name: str, size: int = width) -> RmsNorm:
        return RmsNorm(weights.take(f"{name}.weight", size), settings.rms_norm_eps)

    embedding = Embedding(weights.take("embed_tokens.weight", settings.vocab_size, width), None, None, None)
    layers = []
    for number in range(settings.num_hidden_layers):
        name = f"layers.{number}"
        has_bias = settings.attention_bias
        sizes = [heads * head_dim, key_heads * head_dim, key_heads * head_dim]
        names = [f"{name}.self_attn.{part}_proj" for part in "qkv"]
        attention = SelfAttention(
            joined(weights, names, sizes, width, has_bias=has_bias or has_qkv_bias),
            linear(weights, f"{name}.self_attn.o_proj", width, heads * head_dim, has_bias=has_bias),
            heads,
            key_heads,
            head_dim,
            norm(f"{name}.self_attn.q_norm", head_dim) if has_qk_norm else None,
            norm(f"{name}.self_attn.k_norm", head_dim) if has_qk_norm else None,
        )
        mlp = gated(weights, f"{name}.mlp", width, inner, settings.hidden_act)
        before, after = norm(f"{name}.input_layernorm"), norm(f"{name}.post_attention_layernorm")
        layers.append(PreNormLayer(before, attention, after, mlp))
    view = View(
        CausalMasks(keys_multiple=CPU_KEYS_MULTIPLE if weights.device == "cpu" else 1),
        is_causal=True,
        rotary=Rotary(
            head_dim=head_dim,
            theta=rope.theta,
            positions_max=settings.max_position_embeddings,
            dtype=weights.dtype,
            device=weights.device,
            stretch=rope.stretch,
        ),
        varlen_window=(-1, 0),
    )
    return Stack(embedding, [view], layers, norm("norm"))


DECODERS: Final[dict[str, Callable[[Path, Weights], Stack]]] = {
    "llama": decoder,
    "mistral": decoder,
    "qwen2": partial(decoder, has_qkv_bias=True),
    "qwen3": partial(decoder, has_qk_norm=True),
}
