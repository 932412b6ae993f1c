"""The seam between the encoder engine and the way a model is run: padded today, packed where that is faster."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Runner(Protocol):
    """One resident model on one device."""

    @property
    def width(self) -> int:
        """Dimensions of a vector."""

    @property
    def vocabulary(self) -> int:
        """Rows of the token table: valid ids are below."""

    @property
    def weights_bytes(self) -> int:
        """Device memory taken by the weights."""

    def run(self, texts: Sequence[npt.NDArray[np.int32]]) -> npt.NDArray[np.float32]:
        """One vector per text, in order, as the model's modules leave it: [texts, width]. Ids are already checked.

        Raises the runtime's own errors; the engine translates them.
        """
