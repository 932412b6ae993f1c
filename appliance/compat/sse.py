"""Server-sent events: one line of JSON each.

No `id:`, no `retry:` and no event without data: OpenAI's clients choke on them.
"""

from typing import Final

import msgspec

EVENT_STREAM: Final = b"text/event-stream"
DONE: Final = b"data: [DONE]\n\n"

_encoder: Final = msgspec.json.Encoder()


def data(event: object) -> bytes:
    """An event without a name, as OpenAI's chats have them."""
    return b"data: %b\n\n" % _encoder.encode(event)
