"""Text to what it says: words for the reader, reasoning, and function calls, as they come. Pure.

Arguments are given on as the text the model wrote, piece by piece. What looks like a call and is none is given on as
text: nothing is lost. A JSON library is of no use here, since nothing is decoded: what is needed is where a value ends.
"""

import json
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple

from appliance.jobs import CallPart
from appliance.workers.writing.text_stream import overlap
from appliance.workers.writing.tool_styles import Style

HEAD_CHARS_MAX: Final = 4096  # of a call before its arguments; what is longer is none
_NAME_CHARS_MAX: Final = 256
THINK_OPENS: Final = "<think>"
THINK_CLOSES: Final = "</think>"


class Said(NamedTuple):
    """A piece: of the text, of the reasoning, or of a call."""

    text: str = ""
    reasoning: str = ""
    call: CallPart | None = None


class ReasoningParser:
    """Parts what stands between <think> and </think> at the beginning of a text from the rest.

    Line breaks at the ends of a thought, and between it and the answer, are nobody's.
    """

    def __init__(self, *, is_open: bool) -> None:
        """`is_open`: the prompt ended with <think>."""
        self._stage = "opened" if is_open else "start"  # then "thought", "closed", "answer"
        self._rest = ""

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning that is certain now, and the answer."""
        if self._stage == "answer":
            return "", text
        self._rest += text
        if self._stage == "start":
            self._open()
        if self._stage == "opened":
            self._skip_lines(then="thought")
        reasoning = self._thought() if self._stage == "thought" else ""
        if self._stage == "closed":
            self._skip_lines(then="answer")
        answer = ""
        if self._stage == "answer":
            answer, self._rest = self._rest, ""
        return reasoning, answer

    def end(self) -> tuple[str, str]:
        """What was held back."""
        held, self._rest = self._rest, ""
        return (held, "") if self.is_thinking else ("", held)

    @property
    def is_thinking(self) -> bool:
        """Whether what comes is reasoning."""
        return self._stage in ("opened", "thought")

    @property
    def may_answer(self) -> bool:
        """Whether what came last is of the answer, or may turn out to be."""
        return self._stage in ("start", "answer")

    def _open(self) -> None:
        beginning = self._rest.lstrip()
        if beginning.startswith(THINK_OPENS):
            self._rest = beginning[len(THINK_OPENS) :]
            self._stage = "opened"
        elif not THINK_OPENS.startswith(beginning):
            self._stage = "answer"

    def _skip_lines(self, *, then: Literal["thought", "answer"]) -> None:
        self._rest = self._rest.lstrip("\n")
        if self._rest:
            self._stage = then

    def _thought(self) -> str:
        place = self._rest.find(THINK_CLOSES)
        if place >= 0:
            thought, self._rest = self._rest[:place].rstrip("\n"), self._rest[place + len(THINK_CLOSES) :]
            self._stage = "closed"
            return thought
        thought = self._rest[: len(self._rest) - overlap(self._rest, THINK_CLOSES)].rstrip("\n")
        self._rest = self._rest[len(thought) :]
        return thought


class CallParser:
    """Parts calls of one style from the text around them."""

    def __init__(self, style: Style, names: Sequence[str]) -> None:
        """Only calls of functions of these names are calls."""
        self._style = style
        self._names = frozenset(names)
        self._state = self._in_text if style.opens else self._at_start
        self._rest = ""
        self._begun = ""  # of the call at hand, as it was written before its arguments
        self._value = _Value()
        self._is_blank = True  # no words have come yet
        self.calls = 0

    def feed(self, text: str) -> list[Said]:
        """What is certain now."""
        self._rest += text
        said: list[Said] = []
        while self._state(said):
            pass
        return said

    def end(self) -> list[Said]:
        """The rest. A call that was cut within its arguments has those that came; one cut before is text, or nothing.

        Nothing where whole calls came before it: a text of halves would only mislead who reads the calls.
        """
        rest, self._rest = self._rest, ""
        rest = self._begun + rest if self._state == self._in_head else rest
        if self._state == self._in_head and self.calls:
            return []
        return [Said(text=rest)] if self.may_be_text and rest else []

    @property
    def may_be_text(self) -> bool:
        """Whether what came last is text, or may turn out to be."""
        return self._state in (self._in_text, self._at_start, self._in_head)

    # Each state consumes some of `_rest` and returns whether another step may get further.

    def _at_start(self, said: list[Said]) -> bool:
        """Of a style whose call is the whole answer: only an answer that begins like one is one."""
        beginning = self._rest.lstrip()
        if not beginning:
            return False
        self._state = self._in_head if beginning.startswith("{") else self._in_text
        return True

    def _in_text(self, said: list[Said]) -> bool:
        opens = self._style.opens
        text, self._rest = self._rest, ""
        if not opens:
            _say(said, text)
            return False
        place = text.find(opens)
        sure = place if place >= 0 else len(text) - overlap(text, opens)
        if text[:sure].strip():
            self._is_blank = False
        if place < 0:
            # White space before the first call belongs to the call, so it waits for what comes.
            sure = 0 if self._is_blank else sure
            _say(said, text[:sure])
            self._rest = text[sure:]
            return False
        white = text[:place] if self._is_blank else ""
        _say(said, text[len(white) : place])
        self._begun, self._rest = white + opens, text[place + len(opens) :]
        self._state = self._in_head
        return True

    def _in_head(self, said: list[Said]) -> bool:
        found = self._style.head.match(self._rest)
        if found is None or found.end() == len(self._rest):
            closes = self._style.closes
            is_none = len(self._rest) > HEAD_CHARS_MAX or (len(closes) > 1 and closes in self._rest)
            return self._not_a_call(said) if is_none else False
        name = _name(found["name"])
        if name not in self._names:
            return self._not_a_call(said)
        self._begun, self._rest = "", self._rest[found.end() :]
        said.append(Said(call=CallPart(self.calls, name)))
        self._value = _Value()
        self._state = self._in_arguments
        return True

    def _not_a_call(self, said: list[Said]) -> bool:
        # Its opening mark is text now; what follows may hold a call again.
        _say(said, self._begun)
        self._is_blank = self._is_blank and not self._begun
        self._begun = ""
        self._state = self._in_text
        return bool(self._rest)

    def _in_arguments(self, said: list[Said]) -> bool:
        if not self._rest:
            return False
        size = self._value.end_in(self._rest)
        piece, self._rest = self._rest[:size], self._rest[size:]
        if piece:
            said.append(Said(call=CallPart(self.calls, "", piece)))
        if not self._value.is_over:
            return False
        self.calls += 1
        self._state = self._after_call
        return True

    def _after_call(self, said: list[Said]) -> bool:
        """Leave out what closes a call and parts it from the next."""
        style = self._style
        rest = self._rest.lstrip(" \n\r\t}],;")
        if style.closes and rest.startswith(style.closes):
            self._rest = rest[len(style.closes) :]
            return True
        self._rest = rest
        if not rest or style.closes.startswith(rest) or style.opens.startswith(rest):
            return False
        if rest.startswith("{") and style.name != "hermes":
            self._state = self._in_head
            return True
        self._state = self._in_text
        return True


class _Value:
    """Finds where a JSON value ends that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_word = False  # a number, or true, false, null: it ends where something else begins
        self._in_string = False
        self._is_escaped = False
        self.is_over = False

    def end_in(self, text: str) -> int:
        """How much of `text` belongs to the value."""
        for place, char in enumerate(text):
            if self._in_word and not (char.isalnum() or char in "+-."):
                self.is_over = True
                return place
            if self._ends_with(char):
                self.is_over = True
                return place + 1
        return len(text)

    def _ends_with(self, char: str) -> bool:
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
                return self._depth == 0
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return self._depth <= 0
        elif self._depth == 0 and not char.isspace():
            self._in_word = True
        return False


def _say(said: list[Said], text: str) -> None:
    if text:
        said.append(Said(text=text))


def _name(written: str) -> str:
    try:
        found = json.loads(f'"{written}"')
    except ValueError:
        return written[:_NAME_CHARS_MAX]
    return str(found)
