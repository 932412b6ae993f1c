"""Tiny models with random weights, one per family, saved as their authors save theirs; and texts to run them on.

Needs torch and its friends: a test module asks for them with `pytest.importorskip` before it imports this.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Wie setze ich mein Passwort zurück?",
    "東京の天気は明日も晴れるでしょう。",
    "مرحبا بالعالم",
    "🙂🙂🙂",
    "",
    " ",
    "a",
    "  spaces around  ",
    "line\nbreaks\tand tabs",
    "def area(radius): return 3.14 * radius ** 2",
    "[CLS] spelled out [SEP]",
]
MIXED_TEXTS = [*SENTENCES, *(" ".join(SENTENCES[:4]) + " again" * repeats for repeats in range(0, 280, 10))]

CORPUS = [" ".join(SENTENCES), "again and again the same words are said", "0123456789 .,;:!?"]


def bert_like(vocabulary: list[str], *, unknown: str, before: str, after: str) -> RustTokenizer:
    """A WordPiece tokenizer whose special tokens take the first ids, in the order given."""
    rust = RustTokenizer(models.WordPiece(unk_token=unknown))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=vocabulary))
    return surrounded(rust, before, after)


def byte_level(special_tokens: list[str]) -> RustTokenizer:
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=special_tokens, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    return rust


def unigram() -> RustTokenizer:
    rust = RustTokenizer(models.Unigram())
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<s>", "<pad>", "</s>", "<unk>", "<mask>"], unk_token="<unk>"
    )
    rust.train_from_iterator(CORPUS, trainer)
    return surrounded(rust, "<s>", "</s>")


def surrounded(rust: RustTokenizer, before: str | None, after: str) -> RustTokenizer:
    specials = [(token, rust.token_to_id(token)) for token in (before, after) if token]
    template = f"{before} $A {after}" if before else f"$A {after}"
    rust.post_processor = processors.TemplateProcessing(single=template, special_tokens=specials)
    return rust


# Weights far larger than at the start of a training: attention then tells positions and tokens apart.
SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.15,
}


def tiny_bert() -> tuple[RustTokenizer, dict[str, str], object]:
    specials = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    rust = bert_like([*specials.values(), "[MASK]"], unknown="[UNK]", before="[CLS]", after="[SEP]")
    config = transformers.BertConfig(vocab_size=rust.get_vocab_size(), max_position_embeddings=64, **SIZES)
    return rust, specials, transformers.BertModel(config)


def tiny_mpnet() -> tuple[RustTokenizer, dict[str, str], object]:
    specials = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "[UNK]"}
    rust = bert_like([*specials.values(), "<mask>"], unknown="[UNK]", before="<s>", after="</s>")
    config = transformers.MPNetConfig(vocab_size=rust.get_vocab_size(), max_position_embeddings=66, **SIZES)
    return rust, specials, transformers.MPNetModel(config)


def tiny_xlm_roberta() -> tuple[RustTokenizer, dict[str, str], object]:
    rust = unigram()
    config = transformers.XLMRobertaConfig(
        vocab_size=rust.get_vocab_size(), max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, **SIZES
    )
    specials = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    return rust, specials, transformers.XLMRobertaModel(config)


def tiny_roberta() -> tuple[RustTokenizer, dict[str, str], object]:
    specials = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>"}
    rust = surrounded(byte_level(list(specials.values())), "<s>", "</s>")
    config = transformers.RobertaConfig(
        vocab_size=rust.get_vocab_size(), max_position_embeddings=66, type_vocab_size=1, pad_token_id=1, **SIZES
    )
    return rust, specials, transformers.RobertaModel(config)


def tiny_nomic() -> tuple[RustTokenizer, dict[str, str], object]:
    specials = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    rust = bert_like([*specials.values(), "[MASK]"], unknown="[UNK]", before="[CLS]", after="[SEP]")
    config = transformers.NomicBertConfig(vocab_size=rust.get_vocab_size(), max_position_embeddings=64, **SIZES)
    return rust, specials, transformers.NomicBertModel(config)


def tiny_distilbert() -> tuple[RustTokenizer, dict[str, str], object]:
    """A family that has no packed stack."""
    specials = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    rust = bert_like([*specials.values(), "[MASK]"], unknown="[UNK]", before="[CLS]", after="[SEP]")
    config = transformers.DistilBertConfig(
        vocab_size=rust.get_vocab_size(),
        max_position_embeddings=64,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
        initializer_range=0.15,
    )
    return rust, specials, transformers.DistilBertModel(config)


def tiny_modernbert() -> tuple[RustTokenizer, dict[str, str], object]:
    specials = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    rust = surrounded(byte_level(list(specials.values())), "[CLS]", "[SEP]")
    config = transformers.ModernBertConfig(
        vocab_size=rust.get_vocab_size(),
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        cls_token_id=1,
        eos_token_id=2,
        sep_token_id=2,
        local_attention=8,
        global_attn_every_n_layers=2,
        **SIZES,
    )
    return rust, specials, transformers.ModernBertModel(config)


def tiny_qwen3() -> tuple[RustTokenizer, dict[str, str], object]:
    specials = {"pad_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
    rust = surrounded(byte_level(list(specials.values())), None, "<|endoftext|>")
    config = transformers.Qwen3Config(
        vocab_size=rust.get_vocab_size(), max_position_embeddings=64, num_key_value_heads=2, head_dim=8, **SIZES
    )
    return rust, specials, transformers.Qwen3Model(config)


Family = Callable[[], tuple[RustTokenizer, dict[str, str], object]]
FAMILIES: dict[str, tuple[Family, str]] = {
    "bert": (tiny_bert, "mean"),
    "bert-cls-max": (tiny_bert, "cls max"),
    "roberta": (tiny_roberta, "mean_sqrt_len_tokens"),
    "mpnet": (tiny_mpnet, "mean"),
    "nomic": (tiny_nomic, "mean"),
    "distilbert": (tiny_distilbert, "mean"),
    "xlm-roberta": (tiny_xlm_roberta, "cls"),
    "modernbert": (tiny_modernbert, "mean"),
    "qwen3": (tiny_qwen3, "lasttoken"),
    "qwen3-weighted": (tiny_qwen3, "weightedmean"),
}


def save_family(
    path: Path, family: Family, pooling: str, *, include_prompt: bool = True, dense: bool = False
) -> SentenceTransformer:
    """Random weights, saved as sentence-transformers saves a model; `path` then is a folder to serve."""
    torch.manual_seed(0)
    rust, specials, model = family()
    source = path.with_name(path.name + "-source")
    model.save_pretrained(source)  # type: ignore[attr-defined]  # transformers' models share no typed base here
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=rust, model_max_length=64, **specials)
    tokenizer.save_pretrained(source)
    transformer = Transformer(str(source))
    modes = pooling.split()
    modules = [transformer, Pooling(32, pooling_mode=modes, include_prompt=include_prompt)]
    if dense:
        modules.append(Dense(32 * len(modes), 20))
    saved = SentenceTransformer(modules=[*modules, Normalize()], device="cpu")
    saved.save(str(path), create_model_card=False)
    return saved


def spoil_weights(folder: Path, change: Callable[[str, Any], Any]) -> None:
    """Rewrite the weights; a change to None drops the tensor. Any: it may return None."""
    path = folder / "model.safetensors"
    changed = {name: change(name, tensor) for name, tensor in load_file(path).items()}
    save_file({name: tensor for name, tensor in changed.items() if tensor is not None}, path, {"format": "pt"})


PAIR_TEMPLATES = {
    "bert": "[CLS] $A [SEP] $B:1 [SEP]:1",
    "roberta": "<s> $A </s> </s> $B </s>",
    "xlm-roberta": "<s> $A </s> </s> $B </s>",
    "mpnet": "<s> $A </s> </s> $B </s>",
    "modernbert": "[CLS] $A [SEP] $B [SEP]",
    "modernbert-mean": "[CLS] $A [SEP] $B [SEP]",
    "distilbert": "[CLS] $A [SEP] $B [SEP]",
}
CLASSIFIERS = {
    "bert": (tiny_bert, "BertFor"),
    "roberta": (tiny_roberta, "RobertaFor"),
    "xlm-roberta": (tiny_xlm_roberta, "XLMRobertaFor"),
    "mpnet": (tiny_mpnet, "MPNetFor"),
    "modernbert": (tiny_modernbert, "ModernBertFor"),
    "modernbert-mean": (tiny_modernbert, "ModernBertFor"),
    "distilbert": (tiny_distilbert, "DistilBertFor"),
}


def save_classifier(path: Path, name: str, *, task: str, labels: int) -> None:
    """A tiny classifier for "score" or "tag", saved as transformers saves one, with a tokenizer for pairs."""
    torch.manual_seed(0)
    family, prefix = CLASSIFIERS[name]
    rust, specials, encoder = family()
    config: Any = encoder.config  # type: ignore[attr-defined]  # transformers is untyped here
    config.num_labels = labels
    if name == "modernbert-mean":
        config.classifier_pooling = "mean"
    kind = {"score": "SequenceClassification", "tag": "TokenClassification"}[task]
    getattr(transformers, prefix + kind)(config).save_pretrained(path)
    template = PAIR_TEMPLATES[name]
    tokens = {token for token in ("[CLS]", "[SEP]", "<s>", "</s>") if token in template}
    single = template.split(" $B")[0].removesuffix(" </s>") if "</s> </s>" in template else template.split(" $B")[0]
    rust.post_processor = processors.TemplateProcessing(
        single=single, pair=template, special_tokens=[(token, rust.token_to_id(token)) for token in sorted(tokens)]
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=rust, model_max_length=64, **specials)
    tokenizer.save_pretrained(path)
    if name == "bert":  # its own tokenizer's class would say so
        settings = json.loads((path / "tokenizer_config.json").read_text())
        settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
        (path / "tokenizer_config.json").write_text(json.dumps(settings))
