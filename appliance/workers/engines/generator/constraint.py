"""A grammar's word on which tokens may come next, through llguidance."""

from collections import OrderedDict
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

Logits = npt.NDArray[np.float32]
KEPT_MAX: Final = 16  # compiled grammars; some take tens of megabytes
_BITS: Final = 8


class GrammarFault(ValueError):
    """The grammar cannot be followed: it is bad, or has become too complex. Bounded words for the client."""


class Grammars:
    """Makes the constraints of one model."""

    def __init__(self, folder: Path, *, vocabulary: int, end_ids: tuple[int, ...]) -> None:
        """Raises ValueError for a folder without tokenizer.json."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError("there is no tokenizer.json, which grammars need")
        self._tokenizer = LLTokenizer(path.read_text(), n_vocab=vocabulary, eos_token=list(end_ids) or None)
        self._vocabulary = vocabulary
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # where nothing is written yet

    def constraint(self, grammar: str) -> "Constraint":
        """Raises GrammarFault. The latest grammars are kept: all choices of a request have one, and so have many."""
        matcher = self._compiled.get(grammar)
        if matcher is None:
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
            _check(matcher)
            self._compiled[grammar] = matcher
            if len(self._compiled) > KEPT_MAX:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return Constraint(matcher.deep_copy(), self._vocabulary)


class Constraint:
    """One sequence's place in its grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def narrow(self, logits: Logits) -> Logits:
        """Logits with those tokens alone that may come next. Raises GrammarFault."""
        mask = self._matcher.compute_bitmask()
        _check(self._matcher)
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little", count=self._vocabulary)
        return np.where(bits, logits, np.float32(-np.inf))

    def took(self, token: int) -> None:
        """The token was chosen. Raises GrammarFault."""
        self._matcher.consume_token(token)
        _check(self._matcher)

    @property
    def is_over(self) -> bool:
        """Nothing may come any more but the end."""
        return bool(self._matcher.is_stopped())


def _check(matcher: LLMatcher) -> None:
    if matcher.is_error():
        first = (str(matcher.get_error()).strip().splitlines() or ["no details"])[0]
        raise GrammarFault(f"the answer cannot follow the requested form: {first[:200]}")
