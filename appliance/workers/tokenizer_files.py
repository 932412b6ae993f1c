"""The Rust tokenizer of a model folder, set up as transformers and sentence-transformers would."""

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.normalizers import BertNormalizer, Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from appliance.workers import model_files

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer


def load(folder: Path) -> RustTokenizer:
    """Blocks on the disk. Raises ValueError for a folder without a usable tokenizer."""
    inner = model_files.transformer_folder(folder)
    rust = _rust_tokenizer(inner)
    _adapt(rust, inner)
    return rust


def length(folder: Path, tokens_max: int | None) -> int:
    """The length that applies: the one asked for, held to the position table, or the model's own."""
    if tokens_max is None:
        return model_files.token_limits(folder).tokens_max
    positions_max = model_files.positions_max(folder)
    return tokens_max if positions_max is None else min(tokens_max, positions_max)


def _rust_tokenizer(folder: Path) -> RustTokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        return _converted(folder)
    try:
        return RustTokenizer.from_file(str(path))
    except Exception as exc:  # the library raises bare Exception for a file that it cannot read
        raise ValueError(f"tokenizer.json cannot be read: {exc}") from exc


def _converted(folder: Path) -> RustTokenizer:
    """A tokenizer that exists in an older format only; transformers knows how to convert it."""
    try:
        from transformers import AutoTokenizer  # noqa: PLC0415  # heavy, and optional in the node
    except ImportError as exc:
        raise ValueError("there is no tokenizer.json, and transformers is not installed to convert one") from exc
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ImportError, KeyError) as exc:
        raise ValueError("there is no tokenizer.json, and no other tokenizer that transformers can convert") from exc
    rust = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(rust, RustTokenizer):
        raise ValueError(f"a {type(tokenizer).__name__} has no fast form; save the model with a tokenizer.json")
    return rust


def _adapt(rust: RustTokenizer, folder: Path) -> None:
    """Apply what the folder's other files say about the text, as transformers and sentence-transformers do."""
    rust.no_truncation()
    rust.no_padding()
    normalizer = rust.normalizer
    if isinstance(normalizer, BertNormalizer):
        _follow(normalizer, model_files.tokenizer_config(folder))
        rust.normalizer = normalizer
    if model_files.sentence_config(folder).do_lower_case and not _has_lowercase(normalizer):
        rust.normalizer = NormalizerSequence([Lowercase(), *([normalizer] if normalizer else [])])


def _follow(normalizer: BertNormalizer, config: model_files.TokenizerConfig) -> None:
    """Where tokenizer_config.json and tokenizer.json disagree about a BERT-like, transformers follows the former."""
    if config.do_lower_case is not None:
        normalizer.lowercase = config.do_lower_case
    if config.strip_accents is not None:
        normalizer.strip_accents = config.strip_accents
    if config.tokenize_chinese_chars is not None:
        normalizer.handle_chinese_chars = config.tokenize_chinese_chars


def _has_lowercase(normalizer: "Normalizer | None") -> bool:
    if isinstance(normalizer, NormalizerSequence):
        return any(isinstance(normalizer[i], Lowercase) for i in range(len(normalizer)))
    return isinstance(normalizer, Lowercase)
