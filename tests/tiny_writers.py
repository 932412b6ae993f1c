"""Tiny models that write, with random weights: one of each family that the embedded generator knows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders

from tests.tiny_models import byte_level

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Widths are multiples of 32, as those of real models are: what is left over after whole vectors is rounded otherwise.
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": None,
    "initializer_range": 0.3,  # wide, so that a wrong row changes what is written
}


def _llama(vocabulary: int) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=vocabulary, **SIZES))


def _llama3(vocabulary: int) -> Any:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config = transformers.LlamaConfig(
        vocab_size=vocabulary, rope_parameters=rope, tie_word_embeddings=True, head_dim=16, **SIZES
    )
    return transformers.LlamaForCausalLM(config)


def _mistral(vocabulary: int) -> Any:
    config = transformers.MistralConfig(vocab_size=vocabulary, sliding_window=None, **SIZES)
    return transformers.MistralForCausalLM(config)


def _qwen2(vocabulary: int) -> Any:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(vocab_size=vocabulary, **SIZES))


def _qwen3(vocabulary: int) -> Any:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(vocab_size=vocabulary, head_dim=16, **SIZES))


FAMILIES: dict[str, Callable[[int], Any]] = {
    "llama": _llama,
    "llama3": _llama3,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
}


def vocabulary() -> RustTokenizer:
    """Bytes and a chat's marks."""
    rust = byte_level(list(SPECIALS))
    rust.decoder = decoders.ByteLevel()
    return rust


def save_writer(path: Path, family: str = "llama") -> Any:
    """Save a model as transformers does, in float32; returns transformers' own."""
    torch.manual_seed(0)
    rust = vocabulary()
    model = FAMILIES[family](rust.get_vocab_size())
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_(0, 0.3)  # which starts as zero, and would be left out unseen
    model.save_pretrained(path)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, eos_token="<|im_end|>", chat_template=TEMPLATE, model_max_length=512
    )
    tokenizer.save_pretrained(path)
    return model.eval()
