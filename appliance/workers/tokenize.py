"""Text → token ids, in the node, with the Rust `tokenizers` library only.

The ids are those that sentence-transformers would give the model: its lower-casing, its length, its special tokens; the
text is not stripped. Truncation happens here, after tokenizing the whole text: the count of what was cut is
exact, and one shared tokenizer is never reconfigured, so that any number of threads may use it at once.
"""

import os
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from tokenizers import Encoding
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.normalizers import BertNormalizer, Lowercase
from tokenizers.normalizers import Sequence as NormalizerSequence

from appliance.errors import InvalidRequest, StartupError, TooLong
from appliance.jobs import Truncation
from appliance.workers import model_files

if TYPE_CHECKING:
    from tokenizers.normalizers import Normalizer

T = TypeVar("T")


class Tokens(msgspec.Struct, frozen=True):
    """What an engine computes as one: a text, a pair, or a piece of a text.

    `len(ids) == 4 * count`, int32 little-endian, special tokens included. A model that parses has no ids: it reads
    `text`, and `count` is an estimate.
    """

    ids: bytes
    count: int
    is_truncated: bool
    second_start: int = (
        0  # of a pair, where token type 1 begins; 0 where the model is not told which text a token is of
    )
    rows: Literal["one", "per_token", "any"] = "one"  # how many rows of numbers come back for it
    text: str = ""


class Marked(msgspec.Struct, frozen=True):
    """One tokenized text that remembers where its tokens stand in it."""

    tokens: Tokens
    offsets: npt.NDArray[np.int32]  # [count, 2], characters; (0, 0) for special tokens
    words: npt.NDArray[np.int32]  # [count]; which word of the text, -1 for special tokens


class Tokenizer:
    """The tokenizer of one model. Thread-safe; `encode` blocks, mostly without the GIL."""

    def __init__(self, rust: RustTokenizer, tokens_max: int, *, uses_types: bool = False) -> None:
        self.tokens_max = tokens_max
        self._rust = rust
        self._uses_types = uses_types
        if tokens_max <= rust.num_special_tokens_to_add(is_pair=False):
            raise StartupError(f"tokens_max is {tokens_max}, which leaves no room beside the model's special tokens")

    @classmethod
    def load(cls, folder: Path, tokens_max: int | None = None) -> "Tokenizer":
        """Read the tokenizer of a model folder. Blocks on the disk, for up to seconds with large vocabularies.

        `tokens_max` overrides the model's own length, up to what its positions can hold. Raises `StartupError` for a
        folder without a usable tokenizer.
        """
        # Parallelism comes from the node's threads. Rayon's own pool, one thread per core and shared by all callers,
        # would compete with the engine for the same cores. Read by the library at each call; an operator's choice wins.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        try:
            limit = _limit(folder, tokens_max)
            inner = model_files.transformer_folder(folder)
            rust = _rust_tokenizer(inner)
            _adapt(rust, inner)
            uses_types = model_files.uses_token_types(folder)
        except ValueError as exc:
            raise StartupError(f"the tokenizer cannot be loaded: {exc}") from exc
        return cls(rust, limit, uses_types=uses_types)

    def encode(
        self, texts: Sequence[str], *, prompt: str = "", truncation: Truncation = "end", first_index: int = 0
    ) -> list[Tokens]:
        """Tokenize `prompt + text` for each text, in order.

        A text over `tokens_max` loses its end or its start, never the special tokens; with "none" it raises `TooLong`.
        A text without any token raises `InvalidRequest`. Both name the text's index, counted from `first_index`.
        """
        encodings = self._rust.encode_batch_fast([_well_formed(prompt + text) for text in texts])
        for index, encoding in enumerate(encodings, first_index):
            self._check_length(len(encoding), index, is_cut=truncation != "none")
        return [self._tokens(encoding.ids, encoding, keeps_end=truncation == "start") for encoding in encodings]

    def encode_marked(
        self, texts: Sequence[str], *, truncation: Truncation = "end", first_index: int = 0
    ) -> list[Marked]:
        """Like `encode`, with the place of each token in its text."""
        marked: list[Marked] = []
        for index, encoding in enumerate(self._rust.encode_batch([_well_formed(text) for text in texts]), first_index):
            self._check_length(len(encoding), index, is_cut=truncation != "none")
            keeps_end = truncation == "start"
            offsets = self._kept(encoding.offsets, encoding, keeps_end=keeps_end)
            words = self._kept(encoding.word_ids, encoding, keeps_end=keeps_end)
            marked.append(
                Marked(
                    self._tokens(encoding.ids, encoding, keeps_end=keeps_end),
                    np.array(offsets, dtype=np.int32).reshape(-1, 2),
                    np.array([-1 if word is None else word for word in words], dtype=np.int32),
                )
            )
        return marked

    def cut(self, texts: Sequence[str], *, tokens_max: int) -> list[str]:
        """Each text up to the end of its first `tokens_max` tokens, special ones not counted."""
        encodings = self._rust.encode_batch([_well_formed(text) for text in texts], add_special_tokens=False)
        return [
            text if len(encoding) <= tokens_max else text[: encoding.offsets[tokens_max - 1][1]]
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, truncation: Truncation = "end", first_index: int = 0
    ) -> list[Tokens]:
        """Tokenize each (query, document) as one, in order.

        A pair over `tokens_max` loses tokens from the end of its longer text until both are as long, then from both:
        the rule "longest_first" of transformers and sentence-transformers. With "none" it raises `TooLong`, which names
        the document, counted from `first_index`. Raises `InvalidRequest` for a limit that leaves no room.
        """
        room = self.tokens_max - self._rust.num_special_tokens_to_add(is_pair=True)
        if room < 1:
            raise InvalidRequest(f"the model takes {self.tokens_max} tokens, which leaves no room for a pair of texts")
        encodings = self._rust.encode_batch_fast(
            [(_well_formed(first), _well_formed(second)) for first, second in pairs]
        )
        for index, encoding in enumerate(encodings, first_index):
            self._check_length(len(encoding), index, is_cut=truncation != "none", field="documents")
        return [self._pair_tokens(encoding, room) for encoding in encodings]

    def _pair_tokens(self, encoding: Encoding, room: int) -> Tokens:
        ids, types = encoding.ids, encoding.type_ids
        surplus = len(ids) - self.tokens_max
        if surplus > 0:
            of = encoding.sequence_ids  # 0 or 1 for the tokens of a text, None for special ones
            lengths = of.count(0), of.count(1)
            kept = longest_first(*lengths, room=room)
            ends = [of.index(text) + kept[text] if lengths[text] else 0 for text in (0, 1)]
            places = [place for place, text in enumerate(of) if text is None or place < ends[text]]
            ids, types = [ids[place] for place in places], [types[place] for place in places]
        second_start = types.index(1) if self._uses_types and 1 in types else 0
        return Tokens(_packed(ids), len(ids), surplus > 0, second_start)

    def _check_length(self, count: int, index: int, *, is_cut: bool, field: str = "input") -> None:
        name = f"input {index}" if field == "input" else f"the query with document {index}"
        if count == 0:  # only where the model wants no special tokens
            raise InvalidRequest(f"{name} has no tokens; send some text", param=f"{field}[{index}]")
        if count > self.tokens_max and not is_cut:
            raise TooLong(
                f"{name} has {count} tokens, the model takes {self.tokens_max}; shorten it or allow truncation",
                param=f"{field}[{index}]",
            )

    def _tokens(self, ids: Sequence[int], encoding: Encoding, *, keeps_end: bool) -> Tokens:
        kept = self._kept(ids, encoding, keeps_end=keeps_end)
        return Tokens(_packed(kept), len(kept), len(kept) < len(ids))

    def _kept(self, values: Sequence[T], encoding: Encoding, *, keeps_end: bool) -> Sequence[T]:
        """Of something per token, what is left after truncation."""
        surplus = len(values) - self.tokens_max
        if surplus <= 0:
            return values
        # The mask marks what the model's template put around the text, not what the text itself spells out.
        mask = encoding.special_tokens_mask
        cut = mask.index(0) if keeps_end else len(values) - mask[::-1].index(0) - surplus
        return [*values[:cut], *values[cut + surplus :]]


def longest_first(first: int, second: int, *, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept to fit into `room` together: the longer one loses them first."""
    shorter, longer = sorted((first, second))
    longer = min(longer, max(shorter, room - shorter))
    if shorter + longer > room:
        shorter, longer = room // 2, room - room // 2
    return (shorter, longer) if first <= second else (longer, shorter)


def _limit(folder: Path, tokens_max: int | None) -> int:
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


def _well_formed(text: str) -> str:
    """`text`, lone surrogates (legal in JSON, not in UTF-8) replaced: the tokenizer would refuse the whole batch."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _packed(ids: Sequence[int]) -> bytes:
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()
