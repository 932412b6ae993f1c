"""How wide vectors are computed and answered. Zeros at the end change no cosine, dot product or distance."""

import msgspec
import numpy as np
import numpy.typing as npt

from appliance.errors import InternalError, InvalidRequest

WIDTH_MAX = 65_536

Vectors = npt.NDArray[np.float32]


class Widths(msgspec.Struct, frozen=True):
    """What a node is asked for (None: the model's own), and up to where zeros are added (None: none are)."""

    computed: int | None = None
    padded: int | None = None

    @classmethod
    def of(cls, asked: int | None, *, width: int | None, pad_to: int | None) -> "Widths":
        """The client's word wins over `width` and `pad_to`, the policy of the name that it used.

        A client that asks for the very width the policy pads to gets what the policy says.
        """
        return cls(width, pad_to) if asked is None or asked == pad_to else cls(asked)

    def space(self, of_model: str) -> str:
        """The space of the vectors that are answered, from that of the model's; "" where that is not known."""
        return f"{of_model} padded={self.padded}" if of_model and self.padded is not None else of_model

    def pad(self, vectors: Vectors) -> Vectors:
        """[vectors, computed] → [vectors, padded]. No copy where nothing is added."""
        own = vectors.shape[1]
        if self.padded is None or self.padded == own:
            return vectors
        if self.padded < own:  # a model that said its width only when it was loaded
            raise InternalError(f"this name pads vectors to {self.padded}, the model's have {own}; correct `pad_to`")
        return np.pad(vectors, ((0, 0), (0, self.padded - own)))


def check_width(width: int | None, *, field: str) -> None:
    """Raises InvalidRequest for what no model's width can be, and a job cannot carry."""
    if width is not None and not 1 <= width <= WIDTH_MAX:
        raise InvalidRequest(f"'{field}' is {width}; it must be between 1 and {WIDTH_MAX}", param=field)
