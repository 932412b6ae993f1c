"""What a task asks of a model that writes, and what of its tokens the client reads. The entrance to this package."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from llguidance import LLTokenizer

from appliance.errors import InvalidRequest, StartupError, TooLong
from appliance.jobs import (
    CallPart,
    Candidate,
    Chosen,
    Decide,
    Delta,
    Detokenize,
    Finish,
    Generate,
    Task,
    Text,
    Tokenize,
    Tokenized,
)
from appliance.presets import Facts
from appliance.workers import model_files
from appliance.workers.tokenize import Tokenizer
from appliance.workers.tokens import packed
from appliance.workers.writing import decisions
from appliance.workers.writing.call_parser import THINK_CLOSES, THINK_OPENS, CallParser, ReasoningParser, Said
from appliance.workers.writing.chat_template import ChatTemplate
from appliance.workers.writing.grammars import Grammar, GrammarCache, Thought, Tool, grammar_of, marks_of
from appliance.workers.writing.messages import Message, by_turns, normalized, spelled_out
from appliance.workers.writing.prompt_ids import PromptIds
from appliance.workers.writing.text_stream import Stops, TextStream
from appliance.workers.writing.token_bytes import TokenBytes
from appliance.workers.writing.tool_styles import Style, style_of

_messages: Final = msgspec.json.Decoder(list[dict[str, Any]])  # `Any`: JSON, which the template reads
_OPTIONS_MAX: Final = 255


class Weighing(NamedTuple):
    """One question: after these tokens, how probable is each of the options?"""

    ids: bytes
    options: tuple[int, ...]


class Ended(NamedTuple):
    """The end of a text: what was still held back, and why it ended."""

    delta: Delta | None
    finish: Finish
    stop: str
    reasoning_tokens: int


class Prepared(NamedTuple):
    """A task, read: what the engine is asked, and how its tokens are read."""

    ids: bytes  # of the prompt, int32 little-endian
    input_tokens: int
    tokens_max: int  # of the answer
    grammar: Grammar
    stop_ids: tuple[int, ...]
    writer: "Writer"
    stops: tuple[str, ...]
    functions: tuple[str, ...]  # that may be called
    is_chat: bool
    is_thinking: bool  # the prompt ends within a thought
    has_logprobs: bool

    def text(self) -> "TextWriter":
        """The reader of its tokens."""
        return TextWriter(self)


class Writer:
    """Of one model. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        facts: Facts,
        *,
        tokens_max: int,
        end_ids: Sequence[int],
    ) -> None:
        """Raises ValueError for a tokenizer whose tokens cannot be told as bytes."""
        rust = tokenizer.rust
        guidance = LLTokenizer(rust.to_str())
        added = {token.content for token in rust.get_added_tokens_decoder().values()}
        self.tokens_max = tokens_max
        self.tokens = TokenBytes(rust)
        # A chat's template may end its messages with a token that the model's own settings forgot.
        end = rust.token_to_id(template.token("eos_token") or "") if template is not None else None
        self._stop_ids = () if end is None or end in end_ids else (end,)
        self.end_ids = frozenset([*end_ids, *self._stop_ids])
        self.style = style_of(facts.tool_style, template=template.source if template else "", tokens=added)
        self.thinks = template is not None and THINK_OPENS in template.source
        self._marks = marks_of(rust, guidance)
        self.shown = _shown(self.style, rust)
        self._tokenizer = tokenizer
        self._template = template
        self._prompts = PromptIds(rust)
        self._grammars = GrammarCache(guidance)
        self._labels = decisions.Labels(rust, count_max=_OPTIONS_MAX)
        self._vocabulary = rust.get_vocab_size(with_added_tokens=True)

    @classmethod
    def load(cls, folder: Path, facts: Facts, *, tokens_max: int) -> "Writer":
        """Blocks on the disk. `tokens_max` bounds a prompt and its text together; the model's own length may be less.

        Raises `StartupError` for a folder whose tokenizer or template cannot be used.
        """
        tokenizer = Tokenizer.load(folder, facts.tokens_max)
        try:
            return cls(
                tokenizer,
                ChatTemplate.load(folder),
                facts,
                tokens_max=min(tokens_max, tokenizer.tokens_max),
                end_ids=model_files.end_ids(folder),
            )
        except ValueError as exc:
            raise StartupError(f"{facts.name} cannot be written with: {exc}") from exc

    def narrow(self, tokens_max: int) -> None:
        """The engine takes no more than so many tokens of a prompt and its text together."""
        self.tokens_max = min(self.tokens_max, tokens_max)

    def prepare(self, task: Generate) -> Prepared:
        """Blocks. Raises InvalidRequest or TooLong, naming the field.

        An answer may be as long as the model's length leaves, and is never refused for asking for more.
        """
        tools: list[Tool] = msgspec.json.decode(task.tools) if task.tools and task.tool_choice != "none" else []
        self._check_bias(task)
        is_thinking = False
        field = "messages" if task.messages else "prompt"
        if task.messages:
            ids, is_thinking = self._chat_ids(_decoded(task.messages), tools)
        elif task.ids:
            ids = self._checked(np.frombuffer(task.ids, dtype="<i4").tolist())
        else:
            ids = self._prompts.text_ids(task.prompt)
        room = self._room(ids, field)
        if self._template is not None and self._template.has_single_calls:
            task = msgspec.structs.replace(task, has_parallel_calls=False)
        thought: Thought = "open" if is_thinking else "possible" if task.messages and self.thinks else "none"
        grammar = grammar_of(task, tools, self.style, cache=self._grammars, marks=self._marks, thought=thought)
        return Prepared(
            ids=packed(ids),
            input_tokens=len(ids),
            tokens_max=min(task.tokens_max or room, room),
            grammar=grammar,
            stop_ids=self._stop_ids,
            writer=self,
            stops=task.stop,
            functions=tuple(tool["function"]["name"] for tool in tools),
            is_chat=bool(task.messages),
            is_thinking=is_thinking,
            has_logprobs=task.top_logprobs is not None,
        )

    def prepare_decide(self, task: Decide) -> list[Weighing]:
        """One prompt a question. Blocks; raises like `prepare`."""
        messages = _decoded(task.messages)
        weighings = []
        for question in task.questions:
            labels, options = self._labels.of(question)
            ids, is_thinking = self._chat_ids(decisions.asked(messages, question, labels), [], may_think=False)
            # The answer is the next token: a thought that the template opened is over.
            ids += self._prompts.ids(f"\n{THINK_CLOSES}\n\n") if is_thinking else []
            self._room(ids, "input")
            weighings.append(Weighing(packed(ids), options))
        return weighings

    def answer_at_once(self, task: Task) -> Tokenized | Text:
        """What needs no engine. Raises InvalidRequest for a task that this model does not do."""
        match task:
            case Tokenize(text=text):
                return Tokenized(*self._tokenizer.pieces(text))
            case Detokenize(ids=ids):
                return Text(self._tokenizer.native.text(ids))
            case _:
                raise InvalidRequest("the model writes texts, and does nothing else; choose another", param="model")

    def _chat_ids(
        self, messages: list[Message], tools: list[Tool], *, may_think: bool = True
    ) -> tuple[list[int], bool]:
        """The tokens of a chat's prompt, and whether it ends within a thought."""
        if self._template is None:
            raise InvalidRequest(
                "the model has no chat template; ask /v1/completions, or choose another model", param="model"
            )
        messages = normalized(messages, has_short_ids=self._template.has_short_ids)
        # After what JSON escapes in the arguments of calls has become text.
        messages, tools, mark = self._prompts.guarded(messages, tools)
        if not self._template.takes_tools:
            messages, tools = spelled_out(messages, tools, has_system=self._template.has_system), []
        try:
            prompt = self._template.render(messages, tools, may_think=may_think)
        except InvalidRequest:
            plainer = by_turns(messages, has_system=self._template.has_system)
            if plainer == messages:
                raise
            prompt = self._template.render(plainer, tools, may_think=may_think)
        return self._prompts.ids(prompt, mark=mark), prompt.rstrip().endswith(THINK_OPENS)

    def _room(self, ids: Sequence[int], field: str) -> int:
        """Tokens that are left for an answer; one at least."""
        if not ids:
            raise InvalidRequest(f"'{field}' has no tokens; send some text", param=field)
        room = self.tokens_max - len(ids)
        if room < 1:
            raise TooLong(
                f"'{field}' has {len(ids)} tokens, prompt and answer together may have {self.tokens_max}; shorten it",
                param=field,
            )
        return room

    def _checked(self, ids: list[int]) -> list[int]:
        wrong = next((token for token in ids if not 0 <= token < self._vocabulary), None)
        if wrong is not None:
            raise InvalidRequest(
                f"'prompt' has token {wrong}, the model's are 0 to {self._vocabulary - 1}", param="prompt"
            )
        return ids

    def _check_bias(self, task: Generate) -> None:
        for token, _ in task.sampling.logit_bias:
            if not 0 <= token < self._vocabulary:
                raise InvalidRequest(
                    f"'logit_bias' names token {token}, the model's are 0 to {self._vocabulary - 1}", param="logit_bias"
                )


class TextWriter:
    """Reads the tokens of one text.

    Stop strings are looked for in what is said, and not in thoughts or calls: half a call is of no use to anybody.
    Log-probabilities are of the tokens that the said is made of, and come with it.
    """

    def __init__(self, prepared: Prepared) -> None:
        writer = prepared.writer
        self._writer = writer
        self._has_logprobs = prepared.has_logprobs
        self._stream = TextStream(
            writer.tokens,
            shown=writer.shown if prepared.functions else (),
            goes_on=not prepared.is_chat,
        )
        has_reasoning = prepared.is_chat and writer.thinks
        self._reasoning = ReasoningParser(is_open=prepared.is_thinking) if has_reasoning else None
        self._calls = CallParser(writer.style, prepared.functions) if prepared.functions else None
        self._stops = Stops(prepared.stops)
        self._has_called = False
        self._reasoning_tokens = 0
        self._chosen: list[Chosen] = []  # tokens of which nothing is said yet

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string was met."""
        return bool(self._stops.found)

    def push(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] = (),
        top_ids: Sequence[Sequence[int]] = (),
        top_logprobs: Sequence[Sequence[float]] = (),
    ) -> Delta | None:
        """What these tokens add for the client; None for nothing."""
        if self.is_stopped:
            return None
        said: list[Said] = []
        chosen: list[Chosen] = []
        if not self._has_logprobs:
            said = self._read([token for token in ids if token not in self._writer.end_ids])
        else:
            for one in self._tokens(ids, logprobs, top_ids, top_logprobs):
                more = self._read([one.id])
                chosen += self._told(one, more)
                said += more
        if self._reasoning is not None and self._reasoning.is_thinking:
            self._reasoning_tokens += len(ids)
        return _delta(said, chosen)

    def finish(self, reason: Finish) -> Ended:
        """No token comes any more: it ended by itself ("stop"), or at its limit ("length")."""
        said: list[Said] = []
        if not self.is_stopped:
            said = self._parse(self._stream.flush())
            if self._reasoning is not None:
                reasoning, text = self._reasoning.end()
                said += [Said(reasoning=reasoning)] if reasoning else []
                said += self._calls.feed(text) if self._calls is not None else [Said(text=text)]
            said += self._calls.end() if self._calls is not None else []
            said = self._up_to_stop(said)
            said.append(Said(text=self._stops.flush()))
        if self.is_stopped:  # at its limit, too
            reason = "stop"
        has_calls = self._has_called and self._calls is not None and self._calls.calls > 0
        finish: Finish = "tool_calls" if has_calls and reason == "stop" else reason
        chosen = self._chosen if any(piece.text for piece in said) else ()
        return Ended(_delta(said, chosen), finish, self._stops.found, self._reasoning_tokens)

    def _read(self, ids: Sequence[int]) -> list[Said]:
        return self._up_to_stop(self._parse(self._stream.push(ids)))

    def _parse(self, text: str) -> list[Said]:
        reasoning = ""
        if text and self._reasoning is not None:
            reasoning, text = self._reasoning.feed(text)
        said = [Said(reasoning=reasoning)] if reasoning else []
        if not text:
            return said
        return said + (self._calls.feed(text) if self._calls is not None else [Said(text=text)])

    def _up_to_stop(self, said: Sequence[Said]) -> list[Said]:
        found: list[Said] = []
        for piece in said:
            if self._stops.found:
                break
            if piece.call is not None:
                self._has_called = True
                found.append(Said(text=self._stops.flush()))
            found.append(Said(text=self._stops.feed(piece.text)) if piece.text else piece)
        return found

    def _told(self, one: Chosen, said: Sequence[Said]) -> list[Chosen]:
        """The tokens that what is said now came of, this one the last; others wait, or belong to no text."""
        self._chosen.append(one)
        is_told = any(piece.text for piece in said)
        may_be_text = (self._reasoning is None or self._reasoning.may_answer) and (
            self._calls is None or self._calls.may_be_text
        )
        told = self._chosen if is_told else []
        if is_told or not may_be_text:
            self._chosen = []
        return told

    def _tokens(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float],
        top_ids: Sequence[Sequence[int]],
        top_logprobs: Sequence[Sequence[float]],
    ) -> Iterator[Chosen]:
        data = self._writer.tokens.of
        return (
            Chosen(
                data(token),
                logprobs[place],
                tuple(
                    Candidate(data(other), logprob)
                    for other, logprob in zip(top_ids[place], top_logprobs[place], strict=True)
                )
                if top_ids
                else (),
                token,
            )
            for place, token in enumerate(ids)
            if token not in self._writer.end_ids
        )


def _delta(said: Sequence[Said], chosen: Sequence[Chosen]) -> Delta | None:
    text = "".join(piece.text for piece in said)
    reasoning = "".join(piece.reasoning for piece in said)
    calls: tuple[CallPart, ...] = tuple(piece.call for piece in said if piece.call is not None)
    if not (text or reasoning or calls or chosen):
        return None
    return Delta(text, reasoning, calls, tuple(chosen))


def _decoded(messages: bytes) -> list[Message]:
    """Raises InvalidRequest for what is nested deeper than can be read."""
    try:
        return _messages.decode(messages)
    except (msgspec.DecodeError, RecursionError) as exc:
        raise InvalidRequest(f"'messages' cannot be read: {exc}", param="messages") from exc


def _shown(style: Style, rust: Any) -> frozenset[int]:  # `Any`: the library's, untyped
    """The special tokens that calls are written with."""
    marks = [style.opens, "[ARGS]", style.closes]
    ids = [rust.token_to_id(mark) for mark in marks if mark]
    return frozenset(token for token in ids if token is not None)
