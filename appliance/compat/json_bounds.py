"""Bounds of JSON that is carried for a client: what passes can be written again at any depth of our own calls."""

from typing import Any

import msgspec

from appliance.errors import InvalidRequest

JsonObject = dict[str, Any]  # carried and written again, not read
# Neither carried nor read: nothing is made of what is in it, which can be millions of values.
UnreadObject = dict[str, msgspec.Raw]


def check_bounds(data: object, name: str, *, levels_max: int, values_max: int) -> None:
    """Raises InvalidRequest for data of too many levels of containers, or values; a container is a value too."""
    values = 0
    levels = 0
    row = [data]
    while row:
        values += len(row)
        if values > values_max:
            raise InvalidRequest(f"'{name}' has more than {values_max} values", param=name)
        containers = [value for value in row if isinstance(value, dict | list)]
        levels += bool(containers)
        if levels > levels_max:
            raise InvalidRequest(f"'{name}' is nested deeper than {levels_max} levels", param=name)
        row = [inner for value in containers for inner in (value.values() if isinstance(value, dict) else value)]
