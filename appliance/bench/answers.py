"""Whether an answer to an embeddings call is right: a vector for each input, of one width, finite. Pure."""

import binascii
import math
from typing import Literal, assert_never

import msgspec
import numpy as np

Kind = Literal["right", "wrong", "refused", "failed"]


class Verdict(msgspec.Struct, frozen=True):
    """`right`, or `wrong` (200, but no good vectors), `refused` (429 or 503: come back later), `failed` (any other)."""

    kind: Kind
    tokens: int = 0  # as the server counted them
    reason: str = ""


class _Row(msgspec.Struct, frozen=True):
    index: int
    embedding: str | list[float]


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0


class _Embeddings(msgspec.Struct, frozen=True):
    data: list[_Row]
    usage: _Usage = _Usage()


_decoder = msgspec.json.Decoder(_Embeddings)
_REASON_CHARS_MAX = 200


def judge(status: int, body: bytes, *, inputs: int) -> Verdict:
    """The verdict on an answer to a call with `inputs` inputs."""
    if status != 200:
        kind: Kind = "refused" if status in {429, 503} else "failed"
        return Verdict(kind, reason=f"{status}: {body[:_REASON_CHARS_MAX].decode(errors='replace')}")
    try:
        answer = _decoder.decode(body)
    except msgspec.DecodeError as error:
        return Verdict("wrong", reason=f"no embeddings answer: {error}"[:_REASON_CHARS_MAX])
    if sorted(row.index for row in answer.data) != list(range(inputs)):
        return Verdict("wrong", reason=f"{len(answer.data)} vectors or repeated indexes for {inputs} inputs")
    widths = {_width(row.embedding) for row in answer.data}
    if len(widths) != 1 or None in widths:
        return Verdict("wrong", reason="vectors are empty, not finite, or of different widths")
    return Verdict("right", tokens=answer.usage.prompt_tokens)


def _width(embedding: str | list[float]) -> int | None:
    """None for what is no vector of finite numbers."""
    match embedding:
        case str():
            try:
                data = binascii.a2b_base64(embedding)
            except binascii.Error:
                return None
            if not data or len(data) % 4 or not np.isfinite(np.frombuffer(data, dtype="<f4")).all():
                return None
            return len(data) // 4
        case list():
            return len(embedding) if embedding and all(map(math.isfinite, embedding)) else None
        case _:
            assert_never(embedding)
