"""Text → token ids, in the node, with the Rust `tokenizers` library only.

The ids are those that sentence-transformers would give the model: its lower-casing, its length, its special tokens; the
text is not stripped. Truncation happens here, after tokenizing the whole text: the count of what was cut is
exact, and one shared tokenizer is never reconfigured, so that any number of threads may use it at once.
"""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Encoding
from tokenizers import Tokenizer as RustTokenizer

from appliance.errors import InvalidRequest, StartupError
from appliance.workers import cutting, model_files, tokenizer_files
from appliance.workers.frame import Frame
from appliance.workers.native_ids import NativeIds
from appliance.workers.tokens import ID_BYTES, Cut, Marked, Tokens, Window, packed, tokens_of
from appliance.workers.word_ids import WordIds


class Tokenizer:
    """The tokenizer of one model. Thread-safe; `encode` blocks, mostly without the GIL."""

    def __init__(self, rust: RustTokenizer, tokens_max: int, *, uses_types: bool = False) -> None:
        self.tokens_max = tokens_max
        self.rust = rust
        self._uses_types = uses_types
        self._frame = Frame(rust, tokens_max)
        self._words = WordIds(rust) if WordIds.suits(rust) else None
        self.native = NativeIds(rust, self._frame)
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
            limit = tokenizer_files.length(folder, tokens_max)
            rust = tokenizer_files.load(folder)
            uses_types = model_files.uses_token_types(folder)
        except ValueError as exc:
            raise StartupError(f"the tokenizer cannot be loaded: {exc}") from exc
        return cls(rust, limit, uses_types=uses_types)

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        truncation: Cut = "end",
        tokens_max: int | None = None,
        first_index: int = 0,
    ) -> list[Tokens]:
        """Tokenize `prompt + text` for each text, in order.

        A text over `tokens_max` (by default, and at most, what the model takes) loses its end or its start, never the
        special tokens or the prompt; with "none" it raises `TooLong`. A text without any token, or a limit without room
        for one, raises `InvalidRequest`. Errors name the text's index, counted from `first_index`.
        """
        limit = self._frame.limit(tokens_max)
        by_words = [self._by_words(prompt + text, limit, may_cut=truncation == "end" and not prompt) for text in texts]
        rest = [place for place, tokens in enumerate(by_words) if tokens is None]
        wholes = iter(
            self._as_wholes(
                [texts[place] for place in rest],
                prompt=prompt,
                truncation=truncation,
                limit=limit,
                indices=[first_index + place for place in rest],
            )
            if rest
            else ()
        )
        return [tokens or next(wholes) for tokens in by_words]

    def _by_words(self, text: str, limit: int, *, may_cut: bool) -> Tokens | None:
        """None for a text that is to be tokenized as a whole."""
        if self._words is None or not (ids := self._words.ids(_well_formed(text))):
            return None
        count = len(ids) // ID_BYTES
        if count <= limit:
            return Tokens(ids, count, is_truncated=False)
        return Tokens(self._words.without_end(ids, limit), limit, is_truncated=True) if may_cut else None

    def _as_wholes(
        self, texts: Sequence[str], *, prompt: str, truncation: Cut, limit: int, indices: Sequence[int]
    ) -> list[Tokens]:
        encodings = self.rust.encode_batch_fast([_well_formed(prompt + text) for text in texts])
        is_any_over = False
        for index, encoding in zip(indices, encodings, strict=True):
            self._frame.check_length(len(encoding), index, limit=limit, is_cut=truncation != "none")
            is_any_over = is_any_over or len(encoding) > limit
        if is_any_over and prompt:
            self._frame.room(limit, prompt=self.ids_of(prompt))
            if truncation == "start":
                return [
                    self._after_prompt(prompt, text, limit=limit) if len(encoding) > limit else _whole(encoding)
                    for text, encoding in zip(texts, encodings, strict=True)
                ]
        keeps_end = truncation == "start"
        return [_tokens(encoding.ids, encoding, limit=limit, keeps_end=keeps_end) for encoding in encodings]

    def windows(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        tokens_max: int | None = None,
        windows_max: int,
        first_index: int = 0,
    ) -> list[list[Window]]:
        """Each text as consecutive pieces, all of `tokens_max` but the last; every token of it is in exactly one.

        A text that fits is one piece, the one that `encode` gives. Raises like `encode`, and `TooLong` for a text of
        more than `windows_max` pieces.
        """
        limit = self._frame.limit(tokens_max)
        encodings = self.rust.encode_batch([_well_formed(prompt + text) for text in texts])
        found: list[list[Window]] = []
        for index, encoding in enumerate(encodings, first_index):
            self._frame.check_length(len(encoding), index, limit=limit, is_cut=True)
            if len(encoding) <= limit:
                found.append([Window(_whole(encoding), len(encoding))])
                continue
            start, end = cutting.body(encoding.special_tokens_mask)
            own = start + _prompt_tokens(encoding, prompt)
            found.append(
                self._frame.windows(
                    encoding.ids[own:end],
                    prompt=encoding.ids[start:own],
                    limit=limit,
                    windows_max=windows_max,
                    index=index,
                )
            )
        return found

    def ids_of(self, text: str) -> list[int]:
        """A text's token ids without special ones."""
        return list(self._encoded(text, has_special=False).ids) if text else []

    def pieces(self, text: str) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """The ids of a text's tokens without special ones, and each token as the vocabulary spells it."""
        encoding = self._encoded(text, has_special=False)
        return tuple(encoding.ids), tuple(encoding.tokens)

    def encode_marked(self, texts: Sequence[str], *, truncation: Cut = "end", first_index: int = 0) -> list[Marked]:
        """Like `encode`, with the place of each token in its text."""
        marked: list[Marked] = []
        for index, encoding in enumerate(self.rust.encode_batch([_well_formed(text) for text in texts]), first_index):
            limit = self.tokens_max
            self._frame.check_length(len(encoding), index, limit=limit, is_cut=truncation != "none")
            keeps_end = truncation == "start"
            mask = encoding.special_tokens_mask
            offsets = cutting.kept(encoding.offsets, mask, limit=limit, keeps_end=keeps_end)
            words = cutting.kept(encoding.word_ids, mask, limit=limit, keeps_end=keeps_end)
            marked.append(
                Marked(
                    _tokens(encoding.ids, encoding, limit=limit, keeps_end=keeps_end),
                    np.array(offsets, dtype=np.int32).reshape(-1, 2),
                    np.array([-1 if word is None else word for word in words], dtype=np.int32),
                )
            )
        return marked

    def cut(self, texts: Sequence[str], *, tokens_max: int) -> list[str]:
        """Each text up to the end of its first `tokens_max` tokens, special ones not counted."""
        encodings = self.rust.encode_batch([_well_formed(text) for text in texts], add_special_tokens=False)
        return [
            text if len(encoding) <= tokens_max else text[: encoding.offsets[tokens_max - 1][1]]
            for text, encoding in zip(texts, encodings, strict=True)
        ]

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, truncation: Cut = "end", first_index: int = 0
    ) -> list[Tokens]:
        """Tokenize each (query, document) as one, in order.

        A pair over `tokens_max` loses tokens from the end of its longer text until both are as long, then from both:
        the rule "longest_first" of transformers and sentence-transformers. With "none" it raises `TooLong`, which names
        the document, counted from `first_index`. Raises `InvalidRequest` for a limit that leaves no room.
        """
        room = self.tokens_max - self.rust.num_special_tokens_to_add(is_pair=True)
        if room < 1:
            raise InvalidRequest(f"the model takes {self.tokens_max} tokens, which leaves no room for a pair of texts")
        encodings = self.rust.encode_batch_fast(
            [(_well_formed(first), _well_formed(second)) for first, second in pairs]
        )
        for index, encoding in enumerate(encodings, first_index):
            is_cut = truncation != "none"
            self._frame.check_length(len(encoding), index, limit=self.tokens_max, is_cut=is_cut, field="documents")
        return [self._pair_tokens(encoding, room) for encoding in encodings]

    def _encoded(self, text: str, *, has_special: bool = True) -> Encoding:
        """As a batch: for one text alone the library keeps Python's lock, for seconds where it is long."""
        (encoding,) = self.rust.encode_batch([_well_formed(text)], add_special_tokens=has_special)
        return encoding

    def _pair_tokens(self, encoding: Encoding, room: int) -> Tokens:
        ids, types = encoding.ids, encoding.type_ids
        surplus = len(ids) - self.tokens_max
        if surplus > 0:
            of = encoding.sequence_ids  # 0 or 1 for the tokens of a text, None for special ones
            lengths = of.count(0), of.count(1)
            kept = cutting.longest_first(*lengths, room=room)
            ends = [of.index(text) + kept[text] if lengths[text] else 0 for text in (0, 1)]
            places = [place for place, text in enumerate(of) if text is None or place < ends[text]]
            ids, types = [ids[place] for place in places], [types[place] for place in places]
        second_start = types.index(1) if self._uses_types and 1 in types else 0
        return Tokens(packed(ids), len(ids), surplus > 0, second_start)

    def _after_prompt(self, prompt: str, text: str, *, limit: int) -> Tokens:
        """A text over the limit without its start: what follows the prompt goes first."""
        encoding = self._encoded(prompt + text)
        count = _prompt_tokens(encoding, prompt)
        ids = cutting.without_start(encoding.ids, encoding.special_tokens_mask, limit=limit, prompt=count)
        return tokens_of(ids, is_truncated=True)


def _prompt_tokens(encoding: Encoding, prompt: str) -> int:
    """How many tokens end within the prompt, which the text begins with; one across its end is the text's."""
    start, end = cutting.body(encoding.special_tokens_mask)
    own = (place for place, (_, ends) in enumerate(encoding.offsets[start:end]) if ends > len(prompt))
    return next(own, end - start) if prompt else 0


def _whole(encoding: Encoding) -> Tokens:
    return tokens_of(encoding.ids, is_truncated=False)


def _tokens(ids: Sequence[int], encoding: Encoding, *, limit: int, keeps_end: bool) -> Tokens:
    if len(ids) <= limit:
        return tokens_of(ids, is_truncated=False)
    kept = cutting.kept(ids, encoding.special_tokens_mask, limit=limit, keeps_end=keeps_end)
    return tokens_of(kept, is_truncated=True)


def _well_formed(text: str) -> str:
    """`text`, lone surrogates (legal in JSON, not in UTF-8) replaced: the tokenizer would refuse the whole batch."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
