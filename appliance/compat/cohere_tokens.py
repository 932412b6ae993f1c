"""`POST /v1/tokenize` and `POST /v1/detokenize` in Cohere's dialect.

cohere-python tokenizes offline unless told otherwise, with a file that `GET /v1/models/{name}` points to. We point to
none, so it comes here.
"""

import msgspec

from appliance.compat.bodies import BodyDecoder
from appliance.compat.cohere_meta import Meta, meta
from appliance.compat.formats import Format
from appliance.errors import InvalidRequest
from appliance.jobs import Detokenize, Tokenize, Tokenized

TEXT_CHARS_MAX = 65_536
TOKENS_MAX = 65_536
TOKEN_ID_MAX = 2**31 - 1  # no vocabulary is larger; the model's own is checked where it is known


class TokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields Cohere documents."""

    text: str
    model: str


class DetokenizeBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields Cohere documents."""

    tokens: list[int]
    model: str


class TokenizeCall(msgspec.Struct, frozen=True):
    """A checked request."""

    model: str
    task: Tokenize
    ignored: tuple[str, ...]


class DetokenizeCall(msgspec.Struct, frozen=True):
    """A checked request."""

    model: str
    task: Detokenize
    ignored: tuple[str, ...]


class TokenizeAnswer(msgspec.Struct, frozen=True):
    """Ids and texts of the tokens, special ones left out."""

    tokens: tuple[int, ...]
    token_strings: tuple[str, ...]
    meta: Meta


class DetokenizeAnswer(msgspec.Struct, frozen=True):
    """The text."""

    text: str
    meta: Meta


_tokenize_bodies = BodyDecoder(TokenizeBody)
_detokenize_bodies = BodyDecoder(DetokenizeBody)


def decode_tokenize(body: bytes, form: Format = "json") -> TokenizeCall:
    """Raises MalformedBody or InvalidRequest; `param` names the field at fault."""
    fields, ignored = _tokenize_bodies.decode(body, form)
    if not 1 <= len(fields.text) <= TEXT_CHARS_MAX:
        raise InvalidRequest(
            f"'text' has {len(fields.text)} characters; it must have 1 to {TEXT_CHARS_MAX}", param="text"
        )
    return TokenizeCall(fields.model, Tokenize(fields.text), ignored)


def decode_detokenize(body: bytes, form: Format = "json") -> DetokenizeCall:
    """Raises like `decode_tokenize`."""
    fields, ignored = _detokenize_bodies.decode(body, form)
    if not 1 <= len(fields.tokens) <= TOKENS_MAX:
        raise InvalidRequest(
            f"'tokens' has {len(fields.tokens)} tokens; it must have 1 to {TOKENS_MAX}", param="tokens"
        )
    for index, token in enumerate(fields.tokens):
        if not 0 <= token <= TOKEN_ID_MAX:
            raise InvalidRequest(f"'tokens[{index}]' is no token of any model", param=f"tokens[{index}]")
    return DetokenizeCall(fields.model, Detokenize(tuple(fields.tokens)), ignored)


def tokenize_answer(found: Tokenized) -> TokenizeAnswer:
    """The answer to `/v1/tokenize`."""
    return TokenizeAnswer(found.ids, found.pieces, meta("1"))


def detokenize_answer(text: str) -> DetokenizeAnswer:
    """The answer to `/v1/detokenize`."""
    return DetokenizeAnswer(text, meta("1"))
