"""The protocol every engine adapter implements. `host.py` picks one; the node only ever sees its frames."""

from collections.abc import Iterable
from typing import Protocol

from appliance.workers.wire import Begin, Encode, Encoded, Load, Loaded, Step


class OutOfMemory(Exception):  # a condition, named as errors.py names its own
    """The device ran out of memory for this batch; a smaller one may fit. The adapter has freed what it could."""


class DeviceLost(Exception):
    """The device or its context is broken for good (a CUDA fault): the process exits, and a new one takes over."""


class Engine(Protocol):
    """A runtime that holds models on one device. Called from one thread, one frame at a time."""

    def load(self, order: Load) -> Loaded:
        """Make the model resident. Raises ValueError for a model that this engine cannot serve, or `OutOfMemory`."""

    def encode(self, batch: Encode) -> Encoded:
        """Compute one batch. Raises `OutOfMemory`, or ValueError for a batch that is not well-formed."""


class TextEngine(Protocol):
    """A runtime that writes texts with one model. Called from one thread; `step` is called as long as it has work."""

    def load(self, order: Load) -> Loaded:
        """See `Engine.load`."""

    @property
    def is_idle(self) -> bool:
        """Whether a step would have nothing to do."""

    def begin(self, begin: Begin) -> None:
        """Take a sequence on. What is wrong with it comes as a fault with the next step."""

    def abort(self, numbers: Iterable[int]) -> None:
        """Forget these sequences; unknown ones are ignored."""

    def step(self) -> Step:
        """Compute the next tokens. Blocks for a pass or two of the model."""
