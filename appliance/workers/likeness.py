"""How like two texts are, by their vectors: relevance from a model that only embeds. Pure.

Both measures lie in [-1, 1] for unit vectors; `relevance` maps them to [0, 1] without changing any order.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.float32]  # [rows, width], each of length one
Likeness = npt.NDArray[np.float64]  # [documents]


def similarity(query: Rows, documents: Rows) -> Likeness:
    """The cosine of one query's vector, [1, width], with each document's, [documents, width]."""
    result: Likeness = documents.astype(np.float64) @ query[0].astype(np.float64)
    return result


def maxsim(query: Rows, documents: Sequence[Rows]) -> Likeness:
    """For each document the mean, over the query's tokens, of the cosine with the document's closest token.

    Late interaction (ColBERT: Khattab and Zaharia 2020), a mean instead of a sum: it does not grow with the query.
    """
    return np.array([(query @ document.T).max(axis=1).mean(dtype=np.float64) for document in documents])


def relevance(likeness: Likeness) -> Likeness:
    """[-1, 1] → [0, 1]: half is "nothing in common". What rounding leaves over 1 is cut."""
    result: Likeness = np.clip((1 + likeness) / 2, 0.0, 1.0)
    return result
