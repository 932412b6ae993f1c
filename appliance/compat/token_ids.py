"""OpenAI's token ids as text: some clients (LangChain by default) tokenize before they send.

They use the encoding of the model they ask for, or cl100k for a name that OpenAI does not have, and may cut a text
within a character. So the ids are read with the encoding of that name, and half characters become U+FFFD, as tiktoken's
`decode(errors="replace")` has it. The served model's own tokenizer then reads the text.

The tables come with the package bpe-openai: no download. Reading them takes about two seconds and 100 MB a process, the
first time that ids arrive; call `texts` on a thread.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np

from appliance.errors import InvalidRequest, UnsupportedParameter

if TYPE_CHECKING:
    from bpe_openai import Encoding

ARRAY_IDS_MAX: Final = 8192
REQUEST_IDS_MAX: Final = 300_000
_DEFAULT: Final = "cl100k_base"
_SERVED: Final = (_DEFAULT, "o200k_base")
# Newer than the package's own table of names.
_O200K: Final = re.compile(r"(chatgpt-4o|gpt-4o|gpt-4\.[15]|gpt-5|gpt-oss|o[134])(?![0-9a-z])")
_NATIVE_ID_MAX: Final = 2**31 - 1


def arrays(values: Sequence[object]) -> tuple[tuple[int, ...], ...]:
    """What `input` holds where it holds ids: one array of them, or several.

    Raises InvalidRequest, naming the array, for anything else in it, an empty one, and for too many ids.
    """
    found = [values] if not isinstance(values[0], list) else values
    total = 0
    for index, array in enumerate(found):
        name = "input" if found[0] is values else f"input[{index}]"
        if not isinstance(array, list) or not all(type(number) is int for number in array):
            raise InvalidRequest(f"'{name}' is not an array of token ids, the first input is", param=name)
        if not array:
            raise InvalidRequest(f"'{name}' is an empty array of token ids", param=name)
        if len(array) > ARRAY_IDS_MAX:
            raise InvalidRequest(
                f"'{name}' has {len(array)} token ids, the limit is {ARRAY_IDS_MAX}; split it", param=name
            )
        total += len(array)
    if total > REQUEST_IDS_MAX:
        raise InvalidRequest(
            f"'input' has {total} token ids in all, the limit is {REQUEST_IDS_MAX}; split it", param="input"
        )
    return tuple(tuple(array) for array in found if isinstance(array, list))


def texts(ids: Sequence[Sequence[int]], *, model: str) -> tuple[str, ...]:
    """Each array as text, by the encoding of the model's name. Blocks, for seconds the first time.

    Raises InvalidRequest, naming the array, for ids that the encoding does not have, and UnsupportedParameter for the
    encodings of models before 2023.
    """
    name = _encoding_name(model)
    if name not in _SERVED:
        raise UnsupportedParameter(
            f"'input' holds token ids of {name}, the encoding of the model's name, which are not served; send texts",
            param="input",
        )
    encoding = _encoding(name)
    return tuple(_text(array, index, encoding) for index, array in enumerate(ids))


def packed(ids: Sequence[Sequence[int]]) -> tuple[bytes, ...]:
    """Each array as int32 little-endian, for a model whose own ids they are. Raises InvalidRequest like `texts`."""
    for index, array in enumerate(ids):
        outside = next((number for number in array if not 0 <= number <= _NATIVE_ID_MAX), None)
        if outside is not None:
            raise _unknown(index, f"{str(outside)[:40]} is none")
    return tuple(np.array(array, dtype="<i4").tobytes() for array in ids)


def _text(array: Sequence[int], index: int, encoding: "Encoding") -> str:
    if min(array) < 0:  # which the package would count from the end
        raise _unknown(index, f"{str(min(array))[:40]} is none")
    try:
        text: str = encoding.decode_bytes(list(array)).decode(errors="replace")
    except (KeyError, IndexError, OverflowError) as error:
        raise _unknown(index, f"one is not of {encoding.name}, which is that of the model's name") from error
    if not text:
        raise InvalidRequest(f"'input[{index}]' is an empty text", param=f"input[{index}]")
    return text


def _unknown(index: int, reason: str) -> InvalidRequest:
    return InvalidRequest(f"'input[{index}]' holds numbers that are no token ids: {reason}", param=f"input[{index}]")


def _encoding_name(model: str) -> str:
    if _O200K.match(model):
        return "o200k_base"
    from bpe_openai import encoding_name_for_model  # noqa: PLC0415  # takes a second

    try:
        return str(encoding_name_for_model(model))
    except KeyError:
        return _DEFAULT


@lru_cache(maxsize=len(_SERVED))
def _encoding(name: str) -> "Encoding":
    from bpe_openai import get_encoding  # noqa: PLC0415  # takes a second

    encoding: Encoding = get_encoding(name)
    return encoding
