"""What each token of a vocabulary stands for, in bytes: a token may be a part of a character."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from tokenizers import Tokenizer as RustTokenizer

_BYTE_PIECE: Final = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE: Final = "▁"  # of SentencePiece


class TokenBytes:
    """Of one tokenizer, computed when a token is first met. Thread-safe."""

    def __init__(self, rust: RustTokenizer) -> None:
        """Raises ValueError for a decoder of another kind than byte-level BPE and SentencePiece."""
        self._rust = rust
        decoder = json.loads(rust.to_str())["decoder"]
        steps = _steps(decoder)
        kinds = {step["type"] for step in steps}
        self._is_byte_level = "ByteLevel" in kinds
        if not self._is_byte_level and not kinds & {"Metaspace", "ByteFallback"}:
            raise ValueError(f"its tokens cannot be told as bytes (decoder {sorted(kinds)})")
        # Most of SentencePiece's put a space before a text, and take it away again.
        self.drops_first_space = any(_drops_first_space(step) for step in steps)
        self._added = dict(rust.get_added_tokens_decoder())
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """Its bytes; a special token's are its name. Nothing for a number that is no token."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._compute(token)
        return found

    def is_special(self, token: int) -> bool:
        """Whether it is a mark for the model, which no reader sees."""
        added = self._added.get(token)
        return added is not None and added.special

    def _compute(self, token: int) -> bytes:
        added = self._added.get(token)
        if added is not None:
            return added.content.encode()
        piece = self._rust.id_to_token(token)
        if piece is None:
            return b""
        if self._is_byte_level:
            return bytes(_BYTES[char] for char in piece if char in _BYTES)
        if byte := _BYTE_PIECE.fullmatch(piece):
            return bytes([int(byte[1], 16)])
        return piece.replace(_SPACE, " ").encode()


def _drops_first_space(step: Mapping[str, object]) -> bool:
    if step["type"] == "Strip":
        return step.get("content") == " " and step.get("start") == 1
    return step["type"] == "Metaspace" and step.get("prepend_scheme") != "never"


def _steps(decoder: object) -> list[dict[str, Any]]:  # `Any`: JSON
    if not isinstance(decoder, dict):
        return [{"type": "none"}]
    return (
        [step for each in decoder["decoders"] for step in _steps(each)] if decoder["type"] == "Sequence" else [decoder]
    )


def _byte_level() -> dict[str, int]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others for letters from U+0100 on."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTES: Final = _byte_level()
