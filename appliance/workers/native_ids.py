"""Texts that come as ids of the model's own tokens: checked, framed and cut as texts are; and ids as text."""

from collections.abc import Iterable, Sequence

import numpy as np
from tokenizers import Tokenizer as RustTokenizer

from appliance.errors import InvalidRequest
from appliance.workers.frame import Frame
from appliance.workers.tokens import ID_BYTES, Cut, Tokens, Window, tokens_of


class NativeIds:
    """Of one model. Inputs are int32 little-endian, without special tokens. Thread-safe.

    Errors name the client's input, counted from `first_index`; an id that is no token of the model is InvalidRequest.
    """

    def __init__(self, rust: RustTokenizer, frame: Frame) -> None:
        self._rust = rust
        self._frame = frame

    def encode(
        self,
        inputs: Sequence[bytes],
        *,
        prompt: Sequence[int] = (),
        truncation: Cut = "end",
        tokens_max: int | None = None,
        first_index: int = 0,
    ) -> list[Tokens]:
        """Like `Tokenizer.encode`; the ids of the prompt come first."""
        limit = self._frame.limit(tokens_max)
        room = self._frame.room(limit, prompt=prompt)
        found: list[Tokens] = []
        for index, ids in enumerate(self._checked(inputs, first_index), first_index):
            self._frame.check_length(limit - room + len(ids), index, limit=limit, is_cut=truncation != "none")
            kept = ids[-room:] if truncation == "start" else ids[:room]
            found.append(tokens_of(self._frame.around([*prompt, *kept]), is_truncated=len(kept) < len(ids)))
        return found

    def windows(
        self,
        inputs: Sequence[bytes],
        *,
        prompt: Sequence[int] = (),
        tokens_max: int | None = None,
        windows_max: int,
        first_index: int = 0,
    ) -> list[list[Window]]:
        """Like `Tokenizer.windows`."""
        limit = self._frame.limit(tokens_max)
        return [
            self._frame.windows(ids, prompt=prompt, limit=limit, windows_max=windows_max, index=index)
            for index, ids in enumerate(self._checked(inputs, first_index), first_index)
        ]

    def text(self, ids: Sequence[int]) -> str:
        """The text of token ids, special ones spelled out."""
        unknown = self._unknown(ids)
        if unknown is not None:
            name = f"tokens[{ids.index(unknown)}]"
            raise InvalidRequest(f"{name} is {unknown}, {self._no_token()}", param=name)
        return str(self._rust.decode(list(ids), skip_special_tokens=False))

    def _checked(self, inputs: Sequence[bytes], first_index: int) -> list[list[int]]:
        """The ids of each input. Raises InvalidRequest for an input without any, or with one that is no token."""
        checked: list[list[int]] = []
        for index, packed in enumerate(inputs, first_index):
            name = f"input[{index}]"
            if not packed or len(packed) % ID_BYTES:
                raise InvalidRequest(f"{name} has no whole number of token ids; send one at least", param=name)
            ids = np.frombuffer(packed, dtype="<i4")
            unknown = self._unknown(np.unique(ids).tolist())
            if unknown is not None:
                raise InvalidRequest(f"{name} has the id {unknown}, {self._no_token()}", param=name)
            checked.append(ids.tolist())
        return checked

    def _unknown(self, ids: Iterable[int]) -> int | None:
        """The first id that is no token of the model."""
        return next((each for each in ids if not 0 <= each < 2**31 or self._rust.id_to_token(each) is None), None)

    def _no_token(self) -> str:
        return f"which is no token of the model; it has {self._rust.get_vocab_size()}, numbered from 0"
