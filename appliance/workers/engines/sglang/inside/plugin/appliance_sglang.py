"""Runs inside SGLang, which finds it by its entry point: a grammar backend that takes llguidance's own JSON.

SGLang knows JSON schemas, regular expressions and two dialects of EBNF. The appliance's grammars of tool calls and
structured output are made in the node for any engine, and are more than those can say. They come in the field `ebnf`
of a request. SGLang keeps each compiled grammar for as long as it lives; this backend keeps the latest `KEPT_MAX`.
"""

import json
from collections import OrderedDict
from typing import Any, Final

import torch
from appliance_loopback import use_loopback
from llguidance import LLMatcher, LLTokenizer
from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask
from sglang.srt.constrained.base_grammar_backend import (
    BaseGrammarObject,
    GrammarRow,
    InvalidGrammarObject,
    register_grammar_backend,
)
from sglang.srt.constrained.llguidance_backend import GuidanceBackend, GuidanceGrammar
from sglang.srt.server_args import add_grammar_backend_choices

NAME: Final = "appliance"
KEPT_MAX: Final = 128
GRAMMAR_CHARS_MAX: Final = 1_048_576
# By these words `answers.py` knows that a request's grammar is to blame, which SGLang calls an error of its own.
UNFIT: Final = "the answer cannot follow the requested form"
_WORDS_MAX: Final = 200
_BITS: Final = 32


class KeptGrammars(OrderedDict[tuple[str, str], BaseGrammarObject]):
    """The most recently used `KEPT_MAX`."""

    def get(self, key: tuple[str, str], default: Any = None) -> Any:
        """As a dict's; what is asked for is kept longest."""
        if key not in self:
            return default
        self.move_to_end(key)
        return super().__getitem__(key)

    def __setitem__(self, key: tuple[str, str], value: BaseGrammarObject) -> None:
        super().__setitem__(key, value)
        while len(self) > KEPT_MAX:
            self.popitem(last=False)


class ApplianceGrammar(GuidanceGrammar):
    """One grammar at one place in a text.

    What may come next is computed when a token is accepted, not when it is needed: a grammar may get too complex on the
    way, llguidance then allows nothing but the end, and SGLang would take it for the text's own. An error out of
    `accept_token` aborts the request in time.
    """

    def __init__(
        self,
        llguidance_tokenizer: LLTokenizer,
        serialized_grammar: str,
        *,
        ll_matcher: LLMatcher | None = None,
        next_mask: torch.Tensor | None = None,
    ) -> None:
        """Raises ValueError for a grammar that cannot be followed."""
        super().__init__(llguidance_tokenizer, serialized_grammar, ll_matcher=ll_matcher)
        self._next_mask = next_mask if next_mask is not None else self._computed_mask()

    def copy(self) -> "ApplianceGrammar":
        """At the same place, without compiling it."""
        return ApplianceGrammar(
            self.llguidance_tokenizer,
            self.serialized_grammar,
            ll_matcher=self.ll_matcher.deep_copy(),
            next_mask=self._next_mask,
        )

    def accept_token(self, token: int) -> None:
        """Raises ValueError where nothing can follow it any more."""
        super().accept_token(token)
        if not self.finished:
            self._next_mask = self._computed_mask()

    def rollback(self, num_tokens: int) -> None:
        """Take tokens back."""
        super().rollback(num_tokens)
        self._next_mask = self._computed_mask()

    def fill_vocab_mask(self, vocab_mask: torch.Tensor, idx: int) -> None:
        """What may come next."""
        vocab_mask[idx] = self._next_mask

    @staticmethod
    def fill_vocab_mask_batched(entries: list[GrammarRow], vocab_mask: torch.Tensor) -> None:
        """For each its own."""
        BaseGrammarObject.fill_vocab_mask_batched(entries, vocab_mask)

    def _computed_mask(self) -> torch.Tensor:
        mask = allocate_token_bitmask(1, self.llguidance_tokenizer.vocab_size)
        fill_next_token_bitmask(self.ll_matcher, mask, 0)
        self._check_err()
        return mask[0]

    def _check_err(self) -> None:
        if self.ll_matcher.is_error():
            first = (str(self.ll_matcher.get_error()).strip().splitlines() or ["no details"])[0]
            raise ValueError(f"{UNFIT}: {first[:_WORDS_MAX]}")

    @staticmethod
    def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
        """As llguidance does, which compiles this for half a minute at the first use: on a CPU it pays nothing."""
        if logits.device.type != "cpu":
            GuidanceGrammar.apply_vocab_mask(logits, vocab_mask)
            return
        bits = (vocab_mask.unsqueeze(-1) >> torch.arange(_BITS, dtype=torch.int32)) & 1
        is_allowed = bits.flatten(1).bool()
        known = min(logits.shape[-1], is_allowed.shape[-1])
        logits[:, :known].masked_fill_(~is_allowed[:, :known], float("-inf"))
        logits[:, known:] = float("-inf")


class ApplianceGrammars(GuidanceBackend):
    """SGLang's llguidance backend, whose `ebnf` is a grammar in llguidance's JSON."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cache = KeptGrammars()

    def dispatch_ebnf(self, key_string: str) -> BaseGrammarObject:
        """Compile it; what cannot be compiled fails that one request."""
        if len(key_string) > GRAMMAR_CHARS_MAX:
            return InvalidGrammarObject(f"it has {len(key_string)} characters, {GRAMMAR_CHARS_MAX} are taken")
        try:
            is_grammar = "grammars" in json.loads(key_string)
        except (ValueError, TypeError):
            is_grammar = False
        if not is_grammar:
            return InvalidGrammarObject("it is not in llguidance's JSON")
        try:
            return ApplianceGrammar(self.llguidance_tokenizer, key_string)
        except ValueError as exc:
            return InvalidGrammarObject(str(exc))


def register() -> None:
    """What SGLang calls in each of its processes."""
    use_loopback()
    add_grammar_backend_choices([NAME])
    register_grammar_backend(NAME, _backend)


def _backend(server_args: Any, tokenizer: Any, vocab_size: int, eos_token_ids: set[int] | None) -> ApplianceGrammars:
    return ApplianceGrammars(tokenizer=tokenizer, n_vocab=vocab_size, eos_token_ids=eos_token_ids)
