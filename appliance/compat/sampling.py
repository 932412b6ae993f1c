"""How texts are sampled, as OpenAI's endpoints are told it. Pure."""

from collections.abc import Mapping
from typing import Final

from appliance.errors import InvalidRequest

STOPS_MAX: Final = 4
STOP_CHARS_MAX: Final = 1000
BIASES_MAX: Final = 1024
BIAS_MAX: Final = 100.0
REPETITION_PENALTY_MIN: Final = 0.01  # less takes logits out of what 32 bits hold

StopField = str | list[str] | None


def checked_stop(stop: StopField, *, field: str = "stop", count_max: int = STOPS_MAX) -> tuple[str, ...]:
    """Raises InvalidRequest for too many, too long or empty ones."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > count_max:
        raise InvalidRequest(f"'{field}' has {len(stops)} strings, the limit is {count_max}", param=field)
    for index, text in enumerate(stops):
        name = field if isinstance(stop, str) else f"{field}[{index}]"
        if not text:
            raise InvalidRequest(f"'{name}' is empty", param=name)
        if len(text) > STOP_CHARS_MAX:
            raise InvalidRequest(f"'{name}' has {len(text)} characters, the limit is {STOP_CHARS_MAX}", param=name)
    return tuple(stops)


def checked_bias(bias: Mapping[str, float] | None) -> tuple[tuple[int, float], ...]:
    """By token ids of the served model. Raises InvalidRequest for what is no id, or no bias from -100 to 100."""
    if not bias:
        return ()
    if len(bias) > BIASES_MAX:
        raise InvalidRequest(f"'logit_bias' has {len(bias)} tokens, the limit is {BIASES_MAX}", param="logit_bias")
    found: list[tuple[int, float]] = []
    for token, value in bias.items():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise InvalidRequest(f"'logit_bias' has '{token[:20]}', which is no token id", param="logit_bias")
        if not -BIAS_MAX <= value <= BIAS_MAX:
            raise InvalidRequest(
                f"'logit_bias' of token {token} is {value}; it must be from -100 to 100", param="logit_bias"
            )
        found.append((int(token), value))
    return tuple(found)


def seed_of(seed: int) -> int:
    """Any 64-bit number as one that generators take."""
    return seed % 2**63
