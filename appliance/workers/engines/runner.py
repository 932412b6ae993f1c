"""The seam between the encoder engine and the way a model is run: padded today, packed where that is faster."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class Runner(Protocol):
    """One resident model on one device."""

    @property
    def width(self) -> int:
        """Dimensions of a vector, or the number of labels."""

    @property
    def vocabulary(self) -> int:
        """Rows of the token table: valid ids are below."""

    @property
    def weights_bytes(self) -> int:
        """Device memory taken by the weights."""

    @property
    def has_token_vectors(self) -> bool:
        """Whether `run` may be asked for the vectors of tokens, which are then as wide as those of texts."""

    def run(
        self,
        texts: Sequence[npt.NDArray[np.int32]],
        second_starts: Sequence[int] = (),
        per_token: Sequence[int] = (),
    ) -> npt.NDArray[np.float32]:
        """One row per text, in order, as the model's modules leave it: [texts, width]. Ids are already checked.

        A text at a position in `per_token` gives one row per token instead: the hidden state before pooling. A model
        that labels tokens gives one row per token of any text: [tokens, width]. `second_starts[i]` is where token type
        1 begins in text i, 0 for nowhere. Raises the runtime's own errors; the engine translates them.
        """
