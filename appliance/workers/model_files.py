"""What a model folder says about itself: where its tokenizer lies, and how long an input may be.

    modules.json                 the modules of a sentence-transformers model; the first is the transformer
    sentence_bert_config.json    max_seq_length, do_lower_case
    tokenizer_config.json        model_max_length
    config.json                  max_position_embeddings, pad_token_id, eos_token_id
    generation_config.json       eos_token_id
    config_sentence_transformers.json   prompts, default_prompt_name
    1_Pooling/config.json        how token vectors become one

Reads JSON only, so that the node and the engine learn the same limits from the same place without any runtime.
"""

from pathlib import Path
from typing import TypeVar

import msgspec

_T = TypeVar("_T")

# Older sentence-transformers versions named the file after the architecture.
_SENTENCE_CONFIG_NAMES = tuple(
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
# Architectures that number positions from `pad_token_id + 1`: that many rows of their position table are never used.
_POSITIONS_AFTER_PAD = frozenset(
    {
        "camembert",
        "data2vec-text",
        "ibert",
        "longformer",
        "mpnet",
        "roberta",
        "roberta-prelayernorm",
        "xlm-roberta",
        "xlm-roberta-xl",
        "xmod",
    }
)
# Tokenizers that number the texts of a pair unless tokenizer_config.json says otherwise, and the architectures that
# have one of them by default.
_TOKENIZERS_WITH_TYPES = frozenset(
    {"BertTokenizer", "DebertaTokenizer", "DebertaV2Tokenizer", "ElectraTokenizer", "FNetTokenizer"}
)
_MODELS_WITH_TYPES = frozenset({"bert", "deberta", "deberta-v2", "electra", "fnet"})
# Tokenizers without a limit of their own announce 1e30; no real model comes near this.
_UNLIMITED_TOKENS = 10_000_000


class TokenLimits(msgspec.Struct, frozen=True):
    """How many tokens one input may have, special tokens included."""

    tokens_max: int  # what the model was made for: sentence-transformers cuts here
    positions_max: int  # what its position table can hold: never to be passed; >= tokens_max


class ModelModule(msgspec.Struct, frozen=True):
    """One line of modules.json."""

    type: str = ""
    path: str = ""


class _Length(msgspec.Struct, frozen=True):
    model_max_length: float | None = None


class SentenceConfig(msgspec.Struct, frozen=True):
    """sentence_bert_config.json, as far as it concerns text."""

    max_seq_length: int | None = None
    do_lower_case: bool = False
    processor_kwargs: _Length = _Length()
    tokenizer_args: _Length = _Length()  # the older name of `processor_kwargs`


class TokenizerConfig(msgspec.Struct, frozen=True):
    """tokenizer_config.json, as far as it concerns text. None: tokenizer.json decides."""

    model_max_length: float | None = None
    do_lower_case: bool | None = None
    strip_accents: bool | None = None
    tokenize_chinese_chars: bool | None = None
    tokenizer_class: str = ""
    model_input_names: list[str] | None = None


class PromptConfig(msgspec.Struct, frozen=True):
    """config_sentence_transformers.json, as far as it concerns text."""

    prompts: dict[str, str | None] = {}
    default_prompt_name: str | None = None


class _Config(msgspec.Struct, frozen=True):
    architectures: list[str] | None = None
    model_type: str = ""
    max_position_embeddings: int | None = None
    pad_token_id: int | None = None


class _End(msgspec.Struct, frozen=True):
    eos_token_id: int | list[int] | None = None


_modules_decoder = msgspec.json.Decoder(list[ModelModule])
_sentence_decoder = msgspec.json.Decoder(SentenceConfig)
_tokenizer_decoder = msgspec.json.Decoder(TokenizerConfig)
_end_decoder = msgspec.json.Decoder(_End)
_config_decoder = msgspec.json.Decoder(_Config)
_prompts_decoder = msgspec.json.Decoder(PromptConfig)
_pooling_decoder = msgspec.json.Decoder(dict[str, object])


def modules(folder: Path) -> list[ModelModule]:
    """The modules of a sentence-transformers folder in order; empty for a plain transformers folder.

    Raises ValueError for a file that is not of that shape, or a module path that leaves the folder.
    """
    found = _read(folder / "modules.json", _modules_decoder) or []
    for module in found:
        if Path(module.path).is_absolute() or ".." in Path(module.path).parts:
            raise ValueError(f"modules.json names the path {module.path!r}, which leaves the model's folder")
    return found


def is_for_texts(folder: Path) -> bool:
    """Whether the model was saved to write texts, and not as one that embeds. Raises like `modules`."""
    config = _read(folder / "config.json", _config_decoder) or _Config()
    return any(name.endswith("ForCausalLM") for name in config.architectures or ()) and not modules(folder)


def transformer_folder(folder: Path) -> Path:
    """Where config.json and the tokenizer lie: the folder itself, or its first module's."""
    found = modules(folder)
    return folder / found[0].path if found else folder


def prompt_config(folder: Path) -> PromptConfig:
    """The prompts of a sentence-transformers folder, or none. Raises ValueError for a file of another shape."""
    return _read(folder / "config_sentence_transformers.json", _prompts_decoder) or PromptConfig()


def pooling(folder: Path) -> str:
    """How the model makes one vector of its tokens': "mean", "cls", "cls+max"; a name, not a setting.

    "mean" for a folder without modules, which is what sentence-transformers does then. "" where no module says it.
    """
    found = modules(folder)
    if not found:
        return "mean"
    for module in found:
        if module.type.rsplit(".", 1)[-1] == "Pooling":
            return _pooling_name(_read(folder / module.path / "config.json", _pooling_decoder) or {})
    return ""


def _pooling_name(config: dict[str, object]) -> str:
    match config.get("pooling_mode"):
        case str(name):
            return name
        case [*names]:
            return "+".join(map(str, names))
    prefix, suffix = "pooling_mode_", "_token"
    on = [
        key.removeprefix(prefix).removesuffix("_tokens").removesuffix(suffix)
        for key, is_on in config.items()
        if key.startswith(prefix) and is_on is True
    ]
    return "+".join(sorted(on)) or "mean"


def sentence_config(folder: Path) -> SentenceConfig:
    """The first sentence_*_config.json of a transformer's folder, or the defaults."""
    for name in _SENTENCE_CONFIG_NAMES:
        config = _read(folder / name, _sentence_decoder)
        if config is not None:
            return config
    return SentenceConfig()


def tokenizer_config(folder: Path) -> TokenizerConfig:
    """tokenizer_config.json of a transformer's folder, or the defaults."""
    return _read(folder / "tokenizer_config.json", _tokenizer_decoder) or TokenizerConfig()


def uses_token_types(folder: Path) -> bool:
    """Whether the tokenizer tells the model of `folder` which tokens are of a second text, by transformers' rules."""
    inner = transformer_folder(folder)
    tokenizer = tokenizer_config(inner)
    if tokenizer.model_input_names is not None:
        return "token_type_ids" in tokenizer.model_input_names
    if tokenizer.tokenizer_class:
        return tokenizer.tokenizer_class.removesuffix("Fast") in _TOKENIZERS_WITH_TYPES
    config = _read(inner / "config.json", _config_decoder) or _Config()
    return config.model_type in _MODELS_WITH_TYPES


def token_limits(folder: Path) -> TokenLimits:
    """The limits of the model in `folder`, by sentence-transformers' own rules, held to what its positions can take.

    Raises ValueError when nothing in the folder bounds the length.
    """
    inner = transformer_folder(folder)
    sentence = sentence_config(inner)
    named = (
        sentence.processor_kwargs.model_max_length
        or sentence.tokenizer_args.model_max_length
        or sentence.max_seq_length
        or tokenizer_config(inner).model_max_length
    )
    positions = positions_max(folder)
    bounds = [int(bound) for bound in (named, positions) if bound and bound < _UNLIMITED_TOKENS]
    if not bounds:
        raise ValueError(
            "the model's files do not say how long an input may be; "
            "add `max_seq_length` to its sentence_bert_config.json"
        )
    return TokenLimits(tokens_max=min(bounds), positions_max=min(bounds) if positions is None else positions)


def end_ids(folder: Path) -> tuple[int, ...]:
    """The tokens that end a text of a model that writes, as generation_config.json says, or else config.json.

    Raises ValueError for a file that cannot be read.
    """
    for name in ("generation_config.json", "config.json"):
        found = _read(folder / name, _end_decoder)
        if found is not None and found.eos_token_id is not None:
            ids = found.eos_token_id
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()


def positions_max(folder: Path) -> int | None:
    """The positions that the model in `folder` can tell apart; None when its config names no limit."""
    config = _read(transformer_folder(folder) / "config.json", _config_decoder) or _Config()
    positions = config.max_position_embeddings
    if positions is None or positions <= 0:  # XLNet-likes announce -1
        return None
    if config.model_type in _POSITIONS_AFTER_PAD:
        # A config that leaves it out means the architecture's default, 1 for all of these.
        return positions - (1 if config.pad_token_id is None else config.pad_token_id) - 1
    return positions


def _read(path: Path, decoder: msgspec.json.Decoder[_T]) -> _T | None:
    """None when there is no such file."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    try:
        return decoder.decode(text)
    except msgspec.DecodeError as exc:
        raise ValueError(f"{path.name} cannot be read: {exc}") from exc
