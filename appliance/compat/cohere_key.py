"""`POST /v1/check-api-key` in Cohere's dialect. There are no organizations here, and so no id of one."""

import msgspec


class CheckKeyAnswer(msgspec.Struct, frozen=True):
    """What the holder of a key is told; who holds none gets a 401 on any path."""

    valid: bool = True
