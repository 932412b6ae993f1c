"""What texts Cohere's endpoints take, and how each is named in an error."""

from collections.abc import Sequence
from typing import Literal

from appliance.errors import InvalidRequest
from appliance.jobs import Truncation

TEXTS_MAX = 96

Truncate = Literal["NONE", "START", "END"]
TRUNCATIONS: dict[Truncate, Truncation] = {"NONE": "none", "START": "start", "END": "end"}


def checked(texts: Sequence[str], *, field: str) -> tuple[str, ...]:
    """The texts. Raises InvalidRequest for none, for more than Cohere takes, and for an empty one."""
    if not texts:
        raise InvalidRequest(f"'{field}' is empty; send at least one text", param=field)
    if len(texts) > TEXTS_MAX:
        raise InvalidRequest(f"'{field}' has {len(texts)} texts, the limit is {TEXTS_MAX}; split it", param=field)
    for index, text in enumerate(texts):
        if not text:
            raise InvalidRequest(f"'{field}[{index}]' is an empty text", param=f"{field}[{index}]")
    return tuple(texts)
