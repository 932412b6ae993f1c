"""Cutting one request into the chunks that are queued: one message per chunk, never one per text.

Several nodes can then share a large request, and a message stays under what the server takes.
"""

from collections.abc import Iterator, Sequence

from appliance.errors import BodyTooLarge

# msgpack's header of a string, and the fields of the job around the inputs.
INPUT_OVERHEAD_BYTES = 5
JOB_OVERHEAD_BYTES = 1024


def chunks(
    inputs: Sequence[str | bytes],
    *,
    bytes_max: int,
    inputs_max: int,
    payload_bytes_max: int,
    shared_bytes: int = 0,
    field: str = "input",
) -> Iterator[range]:
    """Yield consecutive index ranges, each of at most `inputs_max` inputs and, if it has several, `bytes_max` bytes.

    `shared_bytes` is what each chunk holds besides its inputs: a query. A single input may exceed `bytes_max`, never
    the server's `payload_bytes_max`: that raises BodyTooLarge naming it, as an item of `field`.
    """
    room_bytes = payload_bytes_max - JOB_OVERHEAD_BYTES - shared_bytes
    bytes_max = min(bytes_max - shared_bytes, room_bytes)
    first, held_bytes = 0, 0
    for index, text in enumerate(inputs):
        size = _size_bytes(text)
        if size > room_bytes:
            raise BodyTooLarge(
                f"'{field}[{index}]' is {size} B of text, the queue takes {max(0, room_bytes)} B; shorten or split it",
                param=f"{field}[{index}]",
            )
        is_full = index - first >= inputs_max or held_bytes + size > bytes_max
        if is_full and index > first:
            yield range(first, index)
            first, held_bytes = index, 0
        held_bytes += size
    if first < len(inputs):
        yield range(first, len(inputs))


def _size_bytes(item: str | bytes) -> int:
    size = len(item) if isinstance(item, bytes) or item.isascii() else len(item.encode())
    return INPUT_OVERHEAD_BYTES + size
