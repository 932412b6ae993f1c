"""How families of models write function calls.

    hermes   <tool_call>\\n{"name": "f", "arguments": {…}}\\n</tool_call>       Hermes, Qwen, SmolLM2, most others
    llama    {"name": "f", "parameters": {…}} as the whole answer               Llama 3.1 to 3.3
    mistral  [TOOL_CALLS][{"name": "f", "arguments": {…}}, …]                   Mistral, v3 tokenizers
             [TOOL_CALLS]f[ARGS]{…}                                             Mistral, v11 tokenizers on

A style is data: what opens a call, what stands around its arguments. `call_parser.py` reads by it and `grammars.py`
writes by it, so that what a grammar allows is what the parser knows.
"""

import re
from collections.abc import Collection
from typing import Final, Literal, NamedTuple

StyleName = Literal["hermes", "llama", "mistral"]

_NAME: Final = r'"name"\s*:\s*"(?P<name>(?:[^"\\]|\\.)*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*'


class Style(NamedTuple):
    """One way of writing calls.

    Calls are `opens`, the first call, for each other one `between` and the call, and `last`. A call is `before` (with
    the name in it), the arguments, and `after`.
    """

    name: StyleName
    opens: str  # "" where a call is the whole answer: it then begins with "{"
    first: str
    before: str  # with NAME for the function's name, as JSON writes it, or BARE for the name alone
    after: str
    between: str
    last: str
    closes: str  # what the parser takes for the end of a call
    head: re.Pattern[str]  # reads `before`, and what models make of it


HERMES: Final = Style(
    name="hermes",
    opens="<tool_call>",
    first="",
    before='\n{"name": NAME, "arguments": ',
    after="}\n</tool_call>",
    between="\n<tool_call>",
    last="",
    closes="</tool_call>",
    head=re.compile(r"\s*\{\s*" + _NAME),
)
LLAMA: Final = Style(
    name="llama",
    opens="",
    first="",
    before='{"name": NAME, "parameters": ',
    after="}",
    between="; ",
    last="",
    closes="",
    head=re.compile(r"\s*\{\s*(?:\"type\"\s*:\s*\"function\"\s*,\s*)?" + _NAME),
)
MISTRAL: Final = Style(
    name="mistral",
    opens="[TOOL_CALLS]",
    first="[",
    before='{"name": NAME, "arguments": ',
    after="}",
    between=", ",
    last="]",
    closes="]",
    head=re.compile(r"\s*(?:\[\s*|,\s*)?\{\s*" + _NAME),
)
MISTRAL_ARGS: Final = Style(
    name="mistral",
    opens="[TOOL_CALLS]",
    first="",
    before="BARE[ARGS]",
    after="",
    between="[TOOL_CALLS]",
    last="",
    closes="",
    head=re.compile(r"\s*(?P<name>[A-Za-z0-9_-]+)\s*\[ARGS\]\s*"),
)


def style_of(wanted: Literal["", "hermes", "llama", "mistral"], *, template: str, tokens: Collection[str]) -> Style:
    """The style that is asked for, or the one that chat template and added tokens speak of; Hermes' by default."""
    if wanted == "mistral" or (not wanted and MISTRAL.opens in tokens):
        # A vocabulary has tokens for later models, too: the template knows better.
        return MISTRAL_ARGS if "[ARGS]" in (template if MISTRAL.opens in template else tokens) else MISTRAL
    if wanted == "llama" or (not wanted and "<|python_tag|>" in tokens and HERMES.opens not in template):
        return LLAMA
    return HERMES
