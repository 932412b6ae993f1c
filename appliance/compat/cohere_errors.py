"""Cohere's error body: `{"id", "message"}`. Status and headers are those of `openai_errors`."""

from appliance.compat.openai_errors import MESSAGE_CHARS_MAX
from appliance.errors import ApplianceError


def body(error: ApplianceError) -> dict[str, object]:
    """The body; the message is bounded, and begins with the field at fault if it does not name it."""
    message = error.message
    if error.param and error.param not in message:
        message = f"{error.param}: {message}"
    return {"message": message[:MESSAGE_CHARS_MAX]}
