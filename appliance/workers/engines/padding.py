"""How runners that pad keep the padding small."""

from collections.abc import Iterator, Sequence
from typing import Final

# Padding that one pass may carry before another pass is cheaper, in tokens. On a CPU measured with MiniLM in bf16 on
# one thread and batches of 16 and 64 mixed texts: 64 to 128 are the best, no limit runs at 0.3 to 0.7 of their speed.
# On a GPU a pass has a far higher fixed cost; that number is an estimate.
_PADDING_TOKENS_MAX: Final = {"cpu": 128}
_PADDING_TOKENS_MAX_ELSEWHERE: Final = 4096


def padding_tokens_max(device_type: str) -> int:
    """What suits a device ("cpu", "cuda")."""
    return _PADDING_TOKENS_MAX.get(device_type, _PADDING_TOKENS_MAX_ELSEWHERE)


def sub_batches(lengths: Sequence[int], *, padding_tokens_max: int) -> Iterator[list[int]]:
    """Positions grouped by similar length, longest first; a group's padding stays within the limit."""
    group: list[int] = []
    padding_tokens = 0
    for position in sorted(range(len(lengths)), key=lambda position: -lengths[position]):
        short_of_longest = lengths[group[0]] - lengths[position] if group else 0
        if padding_tokens + short_of_longest > padding_tokens_max:
            yield group
            group, padding_tokens, short_of_longest = [], 0, 0
        group.append(position)
        padding_tokens += short_of_longest
    if group:
        yield group
