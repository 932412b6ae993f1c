"""A text's token ids, put together from those of its words, which are tokenized once and remembered.

For tokenizers of the BERT family only: they split a text at white space and around each punctuation mark, and look at
each word alone, so the ids of a text are those of its words in a row. The Rust library takes several times as long for
the same ids, most of it for bookkeeping of where each character came from.
"""

import re
from collections.abc import Sequence

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

from appliance.workers import cutting
from appliance.workers.tokens import ID_BYTES, packed

WORDS_MAX = 32_768  # remembered; then all are forgotten, and learned again as they come
TEXT_CHARS_MAX = 65_536  # longer ones would keep other threads from running
WORD_CHARS_MAX = 32  # longer ones do not come again
# Texts of words that never come again must not pay for learning them: it is earned by words that did.
LEARNED_UNEARNED_MAX = 16_384
EARNED_A_WORD = 8  # words seen again, for one more to be learned

# White space and punctuation beyond ASCII are left to the library, as parts of words.
_WORDS = re.compile(r"[!-/:-@\[-`{-~]|[^ \t\n\r!-/:-@\[-`{-~]+")


class WordIds:
    """The ids of words, packed as int32. Threads may share it: what one forgets another learns again."""

    def __init__(self, rust: RustTokenizer) -> None:
        """Of a tokenizer that `suits`."""
        self._rust = rust
        self._known: dict[str, bytes] = {}
        self._added = [added.content for added in rust.get_added_tokens_decoder().values()]
        self._credit: float = LEARNED_UNEARNED_MAX
        encoding = rust.encode("a")
        start, end = cutting.body(encoding.special_tokens_mask)
        self._head, self._tail = packed(encoding.ids[:start]), packed(encoding.ids[end:])

    @staticmethod
    def suits(rust: RustTokenizer) -> bool:
        """Whether words can be tokenized one by one."""
        return (
            isinstance(rust.pre_tokenizer, BertPreTokenizer)
            and isinstance(rust.normalizer, BertNormalizer)
            and not any(added.normalized for added in rust.get_added_tokens_decoder().values())
        )

    def ids(self, text: str) -> bytes | None:
        """A well-formed text's ids, special ones included; None where it is better tokenized as a whole."""
        if len(text) > TEXT_CHARS_MAX:
            return None
        for added in self._added:  # a loop costs a short text less than `any` of a generator
            if added in text:
                return None
        words = _WORDS.findall(text)
        known = self._known
        try:
            body = b"".join([known[word] for word in words])
        except KeyError:
            if not self._learn([word for word in dict.fromkeys(words) if word not in known]):
                return None
            try:
                body = b"".join([self._known[word] for word in words])
            except KeyError:  # another thread's words were too many
                return None
        self._credit = min(self._credit + len(words) / EARNED_A_WORD, LEARNED_UNEARNED_MAX)
        return self._head + body + self._tail

    def without_end(self, ids: bytes, tokens_max: int) -> bytes:
        """A text's ids without the last of its own, so that `tokens_max` are left."""
        return ids[: ID_BYTES * tokens_max - len(self._tail)] + self._tail

    def _learn(self, words: Sequence[str]) -> bool:
        if len(words) > self._credit or any(len(word) > WORD_CHARS_MAX for word in words):
            return False
        self._credit -= len(words)
        encodings = self._rust.encode_batch_fast(words, add_special_tokens=False)
        if len(self._known) + len(words) > WORDS_MAX:
            self._known = {}
        self._known.update((word, packed(found.ids)) for word, found in zip(words, encodings, strict=True))
        return True
