"""What bytes and bits keep of vectors: the numbers in `appliance/compat/quantized.py`.

python -m tests.bench.quantized
"""

import numpy as np
import numpy.typing as npt

from appliance.compat.quantized import ByteType, quantized
from tests.bench.questions import questions, vectors

NEAREST = 10

Scores = npt.NDArray[np.float64]


def main() -> None:
    rows = vectors([text for text, _ in questions()])
    width = rows.shape[1]
    print(f"{len(rows)} vectors of {width}; the largest number is {np.abs(rows).max() * width**0.5:.2f} / sqrt(width)")
    wide = rows.astype(np.float64)
    exact = _nearest(wide @ wide.T)
    for kind in ("int8", "ubinary"):
        numbers = _numbers(quantized(rows, kind), kind)
        cosines = (numbers * wide).sum(axis=1) / np.linalg.norm(numbers, axis=1)
        kept = np.mean([len(set(a) & set(b)) for a, b in zip(exact, _nearest(numbers @ numbers.T), strict=True)])
        print(f"{kind:8} cosine to the float vector {cosines.min():.5f} at least, {kept:.2f} of the {NEAREST} nearest")


def _numbers(found: npt.NDArray[np.int8] | npt.NDArray[np.uint8], kind: ByteType) -> Scores:
    """Bits as -1 and 1, whose product is what the Hamming distance counts."""
    bits = np.unpackbits(found.astype(np.uint8), axis=1) * 2.0 - 1 if kind == "ubinary" else found
    return bits.astype(np.float64)


def _nearest(scores: Scores) -> npt.NDArray[np.intp]:
    others = scores.copy()
    np.fill_diagonal(others, -np.inf)
    result: npt.NDArray[np.intp] = np.argsort(-others, axis=1, kind="stable")[:, :NEAREST]
    return result


if __name__ == "__main__":
    main()
