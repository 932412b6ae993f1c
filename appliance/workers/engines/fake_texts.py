"""A text engine without a runtime: it writes the prompt's tokens again, last first, and then ends.

For tests, and for exercising a cluster without models. A file `fake.json` (`FakeTextModel`) in the model's folder makes
it slow, or makes chosen tokens fail in each way that a real engine can fail. A text of a grammar is the same: it knows
none.
"""

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from appliance.workers.wire import Begin, Grown, Load, Loaded, Step

FILE_NAME = "fake.json"
Finished = Literal["", "stop", "length"]


class FakeTextModel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the fake behaves. Tokens of None never occur."""

    end_id: int = 2
    load_s: float = 0.0
    step_s: float = 0.0
    crash_token: int | None = None  # once it is written the process exits with `crash_status`
    crash_status: int = 9
    fault_token: int | None = None  # its sequence ends with a fault
    refused_token: int | None = None  # its sequence ends as if its grammar allowed no more
    has_end: bool = True  # otherwise it writes on, round and round, until `tokens_max`


class FakeTexts:
    """See `engine.TextEngine`."""

    def __init__(self) -> None:
        self._model = FakeTextModel()
        self._places = 0
        self._running: dict[int, tuple[Begin, list[int], int]] = {}  # with what comes, and how much has come
        self._waiting: list[Begin] = []

    def load(self, order: Load) -> Loaded:
        """See `engine.TextEngine`."""
        path = Path(order.folder, FILE_NAME)
        try:
            self._model = msgspec.json.decode(path.read_bytes(), type=FakeTextModel) if path.exists() else self._model
        except msgspec.DecodeError as exc:
            raise ValueError(f"{FILE_NAME} cannot be read: {exc}") from exc
        self._places = order.sequences_max
        time.sleep(self._model.load_s)
        return Loaded(
            order.model, 0, order.tokens_max, order.dtype, 0, self._model.load_s, sequences_max=order.sequences_max
        )

    @property
    def is_idle(self) -> bool:
        """See `engine.TextEngine`."""
        return not self._running and not self._waiting

    def begin(self, begin: Begin) -> None:
        """See `engine.TextEngine`."""
        self._waiting.append(begin)

    def abort(self, numbers: Iterable[int]) -> None:
        """See `engine.TextEngine`."""
        dead = frozenset(numbers)
        self._waiting = [begin for begin in self._waiting if begin.sequence not in dead]
        for number in dead:
            self._running.pop(number, None)

    def step(self) -> Step:
        """See `engine.TextEngine`."""
        while self._waiting and len(self._running) < self._places:
            begin = self._waiting.pop(0)
            text = np.frombuffer(begin.ids, dtype="<i4")[::-1].tolist()
            self._running[begin.sequence] = (begin, text, 0)
        time.sleep(self._model.step_s)
        grown = [self._grow(number) for number in list(self._running)]
        for new in grown:
            if new.finish:
                del self._running[new.sequence]
        return Step(tuple(grown), self._model.step_s, len(self._running), len(self._waiting))

    def _grow(self, number: int) -> Grown:
        begin, text, done = self._running[number]
        if begin.adapter:
            return Grown(number, finish="fault", fault="the adapter is not loaded")
        if begin.weighed:
            even = float(-np.log(len(begin.weighed)))
            return Grown(number, (), (even,) * len(begin.weighed), finish="stop")
        is_end = self._model.has_end and done == len(text)
        token = self._model.end_id if is_end else text[done % len(text)]
        if token == self._model.crash_token:
            os._exit(self._model.crash_status)
        if token == self._model.fault_token:
            return Grown(number, finish="fault", fault=f"token {token} was met")
        if token == self._model.refused_token:
            return Grown(number, finish="refused", fault=f"nothing may follow token {token}")
        self._running[number] = (begin, text, done + 1)
        is_full = done + 1 >= begin.tokens_max
        finish: Finished = "stop" if is_end else "length" if is_full else ""
        if begin.top_logprobs is None:
            return Grown(number, (token,), finish=finish)
        top = (token,) * begin.top_logprobs
        return Grown(number, (token,), (0.0,), (top,), ((0.0,) * len(top),), finish=finish)
