"""A classifier from a few labelled examples: ridge regression on their vectors. Pure numpy.

One-against-all least squares in the dual form, as in a least-squares support vector machine (Suykens and Vandewalle,
1999): exact, without iterations, and the same for the same request. Vectors are centred on the examples' mean and
scaled by their spread, so that a model whose vectors all lie close together needs no constants of its own.

`RIDGE` and `TEMPERATURE` were chosen on the questions of chatterbot-corpus 1.3.3 by category (all-MiniLM-L6-v2, 40
random tasks of 2 to 8 categories a row: `tests/bench/few_shot.py`). The temperature is about that of the lowest loss:

    examples a label                    2     4     8    16   2 to 40
    accuracy of this                 0.70  0.78  0.84  0.88  0.84
    accuracy of the nearest mean     0.70  0.76  0.84  0.86  0.83
"""

import numpy as np
import numpy.typing as npt

RIDGE = 1.0
TEMPERATURE = 0.08

Vectors = npt.NDArray[np.float64]


def confidences(examples: Vectors, labels: npt.NDArray[np.intp], inputs: Vectors, *, label_count: int) -> Vectors:
    """How probable each label is for each input: [inputs, labels], each row in [0, 1] with the sum of one.

    `examples` is [examples, width], `labels` [examples] the index of each one's label, `inputs` [inputs, width]. Takes
    time with the cube of the number of examples.
    """
    scores = _scores(examples, labels, inputs, label_count=label_count) / TEMPERATURE
    weights = np.exp(scores - scores.max(axis=1, keepdims=True))
    result: Vectors = weights / weights.sum(axis=1, keepdims=True)
    return result


def _scores(examples: Vectors, labels: npt.NDArray[np.intp], inputs: Vectors, *, label_count: int) -> Vectors:
    mean = examples.mean(axis=0)
    centred = examples - mean
    products = centred @ centred.T
    spread = float(np.trace(products)) / len(examples)
    if spread <= np.finfo(np.float64).eps:  # all examples are one and the same: they tell nothing
        return np.zeros((len(inputs), label_count))
    targets = np.eye(label_count)[labels] - 1 / label_count
    duals = np.linalg.solve(products / spread + RIDGE * np.eye(len(examples)), targets)
    result: Vectors = (inputs - mean) @ centred.T @ duals / spread
    return result
