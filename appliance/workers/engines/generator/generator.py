"""The sequences under way in one model: begun, stepped all together, aborted.

A step computes a chunk of the prompt at hand, then the next token of each sequence that is written. The two are passes
of their own: a row's numbers then depend on nothing that runs beside it, so that a seed gives the same text at any
load. On a CPU, where a pass of few rows is bound by reading the weights, that costs prompts some speed, and a running
text at most one chunk's time a token.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from appliance.workers.engines.generator import sampling
from appliance.workers.engines.generator.cache import Run
from appliance.workers.engines.generator.constraint import Constraint, GrammarFault, Grammars
from appliance.workers.engines.generator.model import CausalModel
from appliance.workers.engines.generator.places import Places, chunk_end
from appliance.workers.wire import Begin, Grown, Step

# Rows of one pass of texts. Up to here a row is computed alike in any company: oneDNN's bfloat16 kernels with AMX, at
# widths that are multiples of 32; with more rows SmolLM2's are rounded otherwise. See tests/e2e/test_generator.py.
ROWS_MAX: Final = 32
# Chunks of a prompt in one step while nothing is written.
_CHUNKS_MAX: Final = 8

_log = logging.getLogger("appliance.engine")


class _Sequence:
    """One text."""

    __slots__ = ("begin", "cached", "chances", "computed", "constraint", "last", "place", "prompt", "written")

    def __init__(self, begin: Begin, constraint: Constraint | None) -> None:
        self.begin = begin
        self.prompt: npt.NDArray[np.int32] = np.frombuffer(begin.ids, dtype="<i4")
        self.constraint = constraint
        self.chances = np.random.Generator(np.random.Philox(begin.sampling.seed))
        self.written: Counter[int] = Counter()
        self.place = -1
        self.computed = 0  # tokens in the cache
        self.cached = 0
        self.last = 0  # the newest token, which is not in the cache yet

    @property
    def length(self) -> int:
        """Of the text so far."""
        return self.written.total()


class Generator:
    """Not thread-safe."""

    def __init__(
        self, model: CausalModel, grammars: Grammars, *, places: int, end_ids: Iterable[int], tokens_max: int
    ) -> None:
        """So many texts at once, each with its prompt of at most `tokens_max` tokens. `end_ids` end a text."""
        self._model = model
        self._grammars = grammars
        self._end_ids = frozenset(end_ids)
        self._tokens_max = tokens_max
        self._places = Places(places)
        self._waiting: deque[_Sequence] = deque()
        self._reading: _Sequence | None = None  # its prompt is being computed
        self._writing: list[_Sequence] = []
        self._faults: list[Grown] = []

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""
        return not (self._waiting or self._reading or self._writing or self._faults)

    def begin(self, begin: Begin) -> None:
        """A sequence waits for its turn. What is wrong with it comes with the next step."""
        try:
            self._check(begin)
            constraint = self._grammars.constraint(begin.grammar) if begin.grammar else None
        except GrammarFault as exc:
            self._faults.append(_refused(begin.sequence, exc))
            return
        except ValueError as exc:
            self._faults.append(_fault(begin.sequence, str(exc)))
            return
        self._waiting.append(_Sequence(begin, constraint))

    def abort(self, numbers: Iterable[int]) -> None:
        """Forget these sequences, and have their places for others."""
        dead = frozenset(numbers)
        self._waiting = deque(one for one in self._waiting if one.begin.sequence not in dead)
        if self._reading is not None and self._reading.begin.sequence in dead:
            self._places.free(self._reading.place)
            self._reading = None
        for one in [one for one in self._writing if one.begin.sequence in dead]:
            self._end(one)

    def step(self) -> Step:
        """What one round gave. Blocks for a pass or two of the model."""
        started_s = time.perf_counter()
        grown, self._faults = self._faults, []
        running = len(self._writing)
        grown += self._read()
        writing = [one for one in self._writing if not any(new.sequence == one.begin.sequence for new in grown)]
        for start in range(0, len(writing), ROWS_MAX):
            grown += self._write(writing[start : start + ROWS_MAX])
        device_s = time.perf_counter() - started_s
        return Step(tuple(grown), device_s, running, len(self._waiting) + (self._reading is not None))

    def _check(self, begin: Begin) -> None:
        count = len(begin.ids) // 4
        if not count or len(begin.ids) % 4:
            raise ValueError("the prompt has no tokens")
        if count + begin.tokens_max > self._tokens_max:
            raise ValueError(f"{count} tokens and an answer of {begin.tokens_max} are over {self._tokens_max}")
        ids = np.frombuffer(begin.ids, dtype="<i4")
        named = [*begin.weighed, *(token for token, _ in begin.sampling.logit_bias)]
        if (
            ids.min() < 0
            or ids.max() >= self._model.vocabulary
            or any(not 0 <= token < self._model.vocabulary for token in named)
        ):
            raise ValueError("a token id is outside of the model's vocabulary")
        if begin.adapter:
            raise ValueError("the embedded generator takes no adapters; SGLang does")

    def _read(self) -> list[Grown]:
        """Compute a chunk of the prompt at hand, or several while no text waits for its next token."""
        grown: list[Grown] = []
        for _ in range(1 if self._writing else _CHUNKS_MAX):
            if self._reading is None and not self._admit():
                break
            one = self._reading
            assert one is not None
            end = chunk_end(one.computed, len(one.prompt))
            is_last = end == len(one.prompt)
            run = Run(0, end - one.computed, one.place, one.computed)
            logits = self._model(one.prompt[one.computed : end], [run], [run.rows - 1] if is_last else [])
            one.computed = end
            self._places.keep(one.place, one.prompt, end)
            if is_last:
                self._reading = None
                self._writing.append(one)
                grown.append(self._grow(one, logits[0]))
                if self._writing:
                    break
        return grown

    def _admit(self) -> bool:
        """The next sequence gets a place, if there are both."""
        if not self._waiting or not self._places.has_free:
            return False
        one = self._reading = self._waiting.popleft()
        one.place, source, one.cached = self._places.take(one.prompt)
        one.computed = one.cached
        if one.cached and source != one.place:
            self._model.cache.copy(source, one.place, tokens=one.cached)
        return True

    def _write(self, writing: Sequence[_Sequence]) -> list[Grown]:
        """The next token of each."""
        runs = [Run(row, 1, one.place, one.computed) for row, one in enumerate(writing)]
        logits = self._model(np.array([one.last for one in writing], dtype=np.int32), runs, range(len(runs)))
        for one in writing:
            one.computed += 1
        return [self._grow(one, row) for one, row in zip(writing, logits, strict=True)]

    def _grow(self, one: _Sequence, logits: npt.NDArray[np.float32]) -> Grown:
        """Choose the sequence's next token by the logits of its place."""
        begin = one.begin
        cached = one.cached if not one.length else 0
        if not np.isfinite(logits).all():
            self._end(one)
            return _fault(begin.sequence, "the model gave numbers that are not finite")
        if begin.weighed:
            self._end(one)
            weights = sampling.logprobs_of(logits)[list(begin.weighed)]
            return Grown(begin.sequence, (), tuple(weights.tolist()), finish="stop", cached=cached)
        try:
            token = self._chosen(one, logits)
        except GrammarFault as exc:
            self._end(one)
            return _refused(begin.sequence, exc)
        one.last = token
        one.written[token] += 1
        finish = self._finish(one, token)
        if finish:
            self._end(one)
        if begin.top_logprobs is None:
            return Grown(begin.sequence, (token,), finish=finish, cached=cached)
        found = sampling.ranked(logits, token, top=begin.top_logprobs)
        return Grown(
            begin.sequence,
            (token,),
            (found.logprob,),
            (found.top_ids,),
            (found.top_logprobs,),
            finish=finish,
            cached=cached,
        )

    def _chosen(self, one: _Sequence, logits: npt.NDArray[np.float32]) -> int:
        how = one.begin.sampling
        open_to = sampling.adjusted(logits, how, written=one.written, prompt=one.prompt)
        if one.constraint is not None:
            open_to = one.constraint.narrow(open_to)
        token = sampling.chosen(open_to, how, chance=float(one.chances.random()))
        if one.constraint is not None:
            one.constraint.took(token)
        return token

    def _finish(self, one: _Sequence, token: int) -> Literal["", "stop", "length"]:
        if token in self._end_ids or token in one.begin.stop_ids:
            return "stop"
        if one.constraint is not None and one.constraint.is_over:
            return "stop"
        return "length" if one.length >= one.begin.tokens_max else ""

    def _end(self, one: _Sequence) -> None:
        self._writing.remove(one)
        self._places.free(one.place)


def _refused(sequence: int, error: GrammarFault) -> Grown:
    return Grown(sequence, finish="refused", fault=str(error))


def _fault(sequence: int, words: str) -> Grown:
    return Grown(sequence, finish="fault", fault=words)
