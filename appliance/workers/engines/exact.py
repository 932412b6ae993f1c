"""A model once more, in float32: for the few texts whose numbers 16 bits cannot hold."""

import logging
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from appliance.workers.engine import OutOfMemory
from appliance.workers.engines.runner import Runner

_log: Final = logging.getLogger("appliance.engine")

Texts = Sequence[npt.NDArray[np.int32]]


class ExactTwin:
    """Loaded when a first text needs it, and kept: one copy of the model at most."""

    def __init__(self, model: str, load: Callable[[], Runner]) -> None:
        self._model = model
        self._load = load
        self._runner: Runner | None = None
        self._is_given_up = False

    def run(
        self, texts: Texts, second_starts: Sequence[int], per_token: Sequence[int]
    ) -> npt.NDArray[np.float32] | None:
        """See `Runner.run`; None where the copy cannot be had, which is tried once."""
        if self._is_given_up:
            return None
        try:
            if self._runner is None:
                _log.warning("%s gave numbers that are not finite; such texts run again in float32", self._model)
                self._runner = self._load()
            return self._runner.run(texts, second_starts, per_token)
        except (OutOfMemory, ValueError) as exc:
            if self._runner is None:
                self._is_given_up = True
            _log.error("%s cannot run in float32, and its texts stay without an answer: %s", self._model, exc)
            return None
