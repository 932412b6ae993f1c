"""OpenAI's error body: `{"error": {"message", "type", "param", "code"}}`, all four keys, always.

`message` is also put at the top level, where Cohere's clients look, so that paths both families share (models, unknown
paths, a refused key) answer each in its own words.
"""

import math

from appliance.errors import ApplianceError, Unauthorized

MESSAGE_CHARS_MAX = 1000
RETRY_AFTER_S_MIN = 1
RETRY_AFTER_S_MAX = 60  # openai-python gives up on anything over 120 s; cohere reads whole seconds only


def body(error: ApplianceError) -> dict[str, object]:
    """The body; the message is bounded."""
    message = error.message[:MESSAGE_CHARS_MAX]
    inner = {"message": message, "type": _type(error), "param": error.param, "code": error.code}
    return {"error": inner, "message": message}


def headers(error: ApplianceError) -> list[tuple[bytes, bytes]]:
    """What tells a client whether and when to try again, and how to authenticate."""
    if isinstance(error, Unauthorized):
        return [(b"www-authenticate", b"Bearer")]
    if not error.is_retryable:
        # The SDKs retry every 5xx unless told: work that is late or broken is not made better by doing it again.
        return [(b"x-should-retry", b"false")] if error.status == 504 else []
    seconds = min(max(error.retry_after_s or RETRY_AFTER_S_MIN, RETRY_AFTER_S_MIN), RETRY_AFTER_S_MAX)
    return [
        (b"retry-after", b"%d" % math.ceil(seconds)),
        (b"retry-after-ms", b"%d" % math.ceil(seconds * 1000)),
    ]


def _type(error: ApplianceError) -> str:
    if isinstance(error, Unauthorized) or error.status in {400, 404, 405, 408, 413}:
        return "invalid_request_error"
    if error.status == 429:
        return "rate_limit_error"
    return "overloaded_error" if error.is_retryable else "server_error"
