"""Documents that an answer is to rely on, as a system message: Cohere's RAG without its citations. Pure.

Cohere's models are trained on documents in their prompt and cite them by spans. The models here are not: they read the
documents as plain text, and nothing is cited.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from appliance.compat.chat_messages import Message
from appliance.compat.json_bounds import JsonObject, check_bounds
from appliance.errors import InvalidRequest

DOCUMENTS_MAX: Final = 10_000
LEVELS_MAX: Final = 64
VALUES_MAX: Final = 20_000

_encoder: Final = msgspec.json.Encoder()
_PREAMBLE: Final = "Use the following documents where they help to answer."


class Document(msgspec.Struct, frozen=True):
    """A text, or fields of one. Its id is for citations, which there are none of."""

    data: JsonObject | str | None = None
    id: str | None = None


def check_count(documents: Sequence[object]) -> None:
    """Raises InvalidRequest for too many."""
    if len(documents) > DOCUMENTS_MAX:
        raise InvalidRequest(
            f"'documents' has {len(documents)} documents, the limit is {DOCUMENTS_MAX}", param="documents"
        )


def data_of(document: Document | None, name: str) -> JsonObject | str:
    """What is in it, checked. Raises InvalidRequest, which names the document."""
    if document is None or document.data is None:
        field = name if document is None else f"{name}.data"
        raise InvalidRequest(f"missing required field '{field}'", param=field)
    if not isinstance(document.data, str):
        check_data(document.data, f"{name}.data")
    return document.data


def check_data(data: object, name: str) -> None:
    """Raises InvalidRequest for JSON that could not be written again within a message."""
    check_bounds(data, name, levels_max=LEVELS_MAX, values_max=VALUES_MAX)


def with_documents(messages: Sequence[Message], documents: Sequence[Mapping[str, object] | str]) -> list[Message]:
    """The chat with the documents in front of it: at the end of its first system message, or in one of their own."""
    if not documents:
        return list(messages)
    listed = "\n\n".join(f"Document {number}\n{_text(each)}" for number, each in enumerate(documents, start=1))
    text = f"{_PREAMBLE}\n\n{listed}"
    if messages and messages[0].role == "system":
        assert isinstance(messages[0].content, str), "Cohere's contents are texts by now"
        first = msgspec.structs.replace(messages[0], content=f"{messages[0].content}\n\n{text}")
        return [first, *messages[1:]]
    return [Message("system", text), *messages]


def _text(document: Mapping[str, object] | str) -> str:
    if isinstance(document, str):
        return document
    return "\n".join(f"{name}: {value_text(value)}" for name, value in document.items())


def value_text(value: object) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else _encoder.encode(value).decode()
