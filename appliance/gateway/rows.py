"""The vectors of a call as one matrix, whatever the jobs they came with."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from appliance.catalog import Route
from appliance.errors import BadVector, InvalidRequest
from appliance.jobs import Part, Rows


def check_dense(route: Route) -> None:
    """Raises InvalidRequest for a model without dense vectors, where nothing else can be answered."""
    if "dense" not in route.outputs:
        raise InvalidRequest(
            f"the model '{route.name[:200]}' has no dense vectors; ask /v1/embeddings for {route.outputs[0]} ones",
            param="model",
        )


def matrix(parts: Sequence[Part]) -> npt.NDArray[np.float32]:
    """[inputs, width] of the dense parts, at least one. Raises BadVector for different widths, or what is no number."""
    rows = [part for part in parts if isinstance(part, Rows)]
    if len({part.width for part in rows}) != 1:
        raise BadVector("the parts of the request came back in different widths; try again")
    data = rows[0].data if len(rows) == 1 else b"".join(part.data for part in rows)
    found = np.frombuffer(data, "<f4").reshape(-1, rows[0].width)
    if not np.isfinite(found).all():
        raise BadVector("a vector came back with a number that is not finite; try again")
    return found
