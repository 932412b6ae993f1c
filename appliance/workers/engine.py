"""The protocol every engine adapter implements. `host.py` picks one; the node only ever sees its frames."""

from typing import Protocol

from appliance.workers.wire import Encode, Encoded, Load, Loaded


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
