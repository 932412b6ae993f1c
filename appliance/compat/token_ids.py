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
# Which encoding clients take for a name: tiktoken's table, to the letter, as ids read with another are another text.
# bpe-openai's own table reads names in any case, and knows models that tiktoken does not.
_O200K: Final = frozenset({"gpt-4.1", "gpt-4o", "o1", "o3", "o4-mini"})
_O200K_PREFIXES: Final = (
    "chatgpt-4o-",
    "ft:gpt-4o",
    "gpt-4.1-",
    "gpt-4.5-",
    "gpt-4o-",
    "gpt-5",
    "gpt-oss-",  # o200k_harmony: the same ids for text
    "o1-",
    "o3-",
    "o4-mini-",
)
# The models before 2023. Their ids would be other texts in cl100k.
_OLD: Final = re.compile(
    r"gpt-?2|(davinci|cushman)-codex|code-(davinci|cushman)-00[12]|(text|code)-davinci-edit-001"
    r"|davinci|curie|babbage|ada|text-davinci-00[123]|text-(curie|babbage|ada)-001"
    r"|text-(similarity-(davinci|curie|babbage|ada)|search-(davinci|curie|babbage|ada)-doc)-001"
    r"|code-search-(babbage|ada)-code-001"
)
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
    encoding = _encoding(encoding_name(model))
    return tuple(_text(array, index, encoding) for index, array in enumerate(ids))


def encoding_name(model: str) -> str:
    """The encoding that clients use for a model of this name. Raises UnsupportedParameter for an old one."""
    if _OLD.fullmatch(model):
        raise UnsupportedParameter(
            f"'input' holds token ids of the encoding that '{model}' had before 2023, which is not served; send texts",
            param="input",
        )
    return "o200k_base" if model in _O200K or model.startswith(_O200K_PREFIXES) else "cl100k_base"


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


@lru_cache(maxsize=2)
def _encoding(name: str) -> "Encoding":
    from bpe_openai import get_encoding  # noqa: PLC0415  # takes a second

    encoding: Encoding = get_encoding(name)
    return encoding
