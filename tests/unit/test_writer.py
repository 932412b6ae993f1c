"""What a model that writes is asked, and how its tokens are read: the whole of the node's text side."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers

from appliance.errors import InvalidRequest, StartupError, TooLong
from appliance.jobs import CallPart, Decide, Delta, Detokenize, Embed, Generate, Question, Sampling, Text, Tokenize
from appliance.presets import Facts
from appliance.workers.writing.writer import Ended, Prepared, Writer
from tests.unit.test_text_stream import byte_level, mark

CHAT = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}<|end|>{% endfor %}"
)
THINKS = CHAT + "{% if enable_thinking is not defined %}<think>\n{% endif %}"
MAY_THINK = CHAT + "{# <think> #}"
OPENS_THOUGHTS = CHAT + "<think>\n"
TOKENS_MAX = 1000
END = mark("<|end|>")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = json.dumps([{"type": "function", "function": {"name": "get", "parameters": CITY}}]).encode()
RUST = byte_level()


def writer_of(folder: Path, template: str | None = CHAT, rust: RustTokenizer = RUST, **config: Any) -> Writer:
    """A model of these files."""
    rust.save(str(folder / "tokenizer.json"))
    table = {"model_max_length": TOKENS_MAX, "eos_token": "<|end|>"} | ({"chat_template": template} if template else {})
    (folder / "tokenizer_config.json").write_text(json.dumps(table | config))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": TOKENS_MAX}))
    return Writer.load(folder, Facts(name="m", tasks=("generate",)), tokens_max=10_000)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return writer_of(tmp_path)


def chat(content: str = "hi", **fields: Any) -> Generate:
    return Generate(messages=json.dumps([{"role": "user", "content": content}]).encode(), **fields)


def ids_of(text: str) -> list[int]:
    return list(RUST.encode(text, add_special_tokens=False).ids)


def prompt_of(prepared: Prepared, rust: RustTokenizer = RUST) -> str:
    found: str = rust.decode(np.frombuffer(prepared.ids, dtype="<i4").tolist(), skip_special_tokens=False)
    return found


def read(prepared: Prepared, text: str, *, is_ended: bool = True) -> tuple[Delta, Ended]:
    """All that comes of a text that the engine writes, a token a step."""
    reader = prepared.text()
    deltas = [reader.push([token]) for token in [*ids_of(text), *([END] if is_ended else [])]]
    ended = reader.finish("stop" if is_ended else "length")
    said = [delta for delta in [*deltas, ended.delta] if delta is not None]
    whole = Delta(
        "".join(delta.text for delta in said),
        "".join(delta.reasoning for delta in said),
        tuple(part for delta in said for part in delta.calls),
    )
    return whole, ended


def test_a_chat_becomes_a_prompt_and_its_tokens_a_text(writer: Writer) -> None:
    prepared = writer.prepare(chat(stop=("\n\n",)))

    assert prompt_of(prepared) == "user:hi<|end|>"
    assert prepared.input_tokens == len(prepared.ids) // 4
    assert prepared.tokens_max == TOKENS_MAX - prepared.input_tokens
    assert prepared.grammar.rules == ""
    whole, ended = read(prepared, "Well, né.\n\nMore")
    assert (whole.text, ended.finish, ended.stop) == ("Well, né.", "stop", "\n\n")


def test_the_templates_last_token_ends_a_text_though_no_setting_says_so(writer: Writer) -> None:
    assert writer.prepare(chat()).stop_ids == (END,)


@pytest.mark.parametrize(("wanted", "given"), [(None, 990), (1, 1), (990, 990), (100_000, 990)])
def test_an_answer_is_as_long_as_the_models_length_leaves(writer: Writer, wanted: int | None, given: int) -> None:
    task = Generate(prompt="0123456789", tokens_max=wanted)

    assert writer.prepare(task).tokens_max == given


@pytest.mark.parametrize(("task", "param"), [(chat("x" * 1000), "messages"), (Generate(prompt="x" * 1000), "prompt")])
def test_a_prompt_that_leaves_no_room_is_refused(writer: Writer, task: Generate, param: str) -> None:
    with pytest.raises(TooLong) as caught:
        writer.prepare(task)

    assert (caught.value.param, caught.value.code) == (param, "context_length_exceeded")


@pytest.mark.parametrize(
    ("task", "param"),
    [
        (Generate(prompt=""), "prompt"),
        (Generate(ids=np.array([3, 10_000], dtype="<i4").tobytes()), "prompt"),
        (Generate(ids=np.array([-1], dtype="<i4").tobytes()), "prompt"),
        (chat(sampling=Sampling(logit_bias=((1_000_000, 1.0),))), "logit_bias"),
        (Generate(messages=b'[{"role": "user", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}]"), "messages"),
        (
            chat(tools=json.dumps([{"function": {"name": "f", "parameters": {"type": "strin"}}}]).encode()),
            "tools[0].function.parameters",
        ),
    ],
)
def test_what_cannot_be_asked_is_refused_by_name(writer: Writer, task: Generate, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        writer.prepare(task)

    assert caught.value.param == param


def test_special_tokens_that_a_client_spells_stay_text(writer: Writer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "\\u003c|end|>"}'}}
    messages = [{"role": "user", "content": "<|end|>"}, {"role": "assistant", "content": None, "tool_calls": [call]}]

    prepared = writer.prepare(Generate(messages=json.dumps(messages).encode()))

    assert np.frombuffer(prepared.ids, dtype="<i4").tolist().count(END) == 2
    assert prompt_of(prepared).count("<|end|>") == 4


def test_calls_come_with_their_names_and_arguments(writer: Writer) -> None:
    prepared = writer.prepare(chat(tools=TOOLS))

    whole, ended = read(
        prepared, 'Let me see.\n<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'
    )

    assert "<tools>" in prompt_of(prepared)
    assert prepared.grammar.rules
    assert (whole.text, ended.finish) == ("Let me see.\n", "tool_calls")
    assert whole.calls[0] == CallPart(0, "get")
    assert "".join(part.arguments for part in whole.calls) == '{"city": "Rome"}'


def test_a_template_of_single_calls_gets_no_other_to_read(tmp_path: Path) -> None:
    single = (
        CHAT + "{% if false %}{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    )
    (tmp_path / "one").mkdir()
    grammars = [
        writer_of(folder, template).prepare(chat(tools=TOOLS, tool_choice="required")).grammar.rules
        for folder, template in [(tmp_path, CHAT), (tmp_path / "one", single)]
    ]

    assert [")*" in grammar for grammar in grammars] == [True, False]


def test_a_call_cut_at_the_limit_says_so(writer: Writer) -> None:
    whole, ended = read(
        writer.prepare(chat(tools=TOOLS)), '<tool_call>\n{"name": "get", "arguments": {"ci', is_ended=False
    )

    assert ended.finish == "length"
    assert "".join(part.arguments for part in whole.calls) == '{"ci'


@pytest.mark.parametrize("choice", [{"tool_choice": "none", "tools": TOOLS}, {}])
def test_without_functions_nothing_is_a_call(writer: Writer, choice: dict[str, Any]) -> None:
    prepared = writer.prepare(chat(**choice))
    text = '<tool_call>\n{"name": "get", "arguments": {}}\n</tool_call>'

    whole, ended = read(prepared, text)

    assert (whole.text, whole.calls, ended.finish) == (text, (), "stop")
    assert prompt_of(prepared) == "user:hi<|end|>"


@pytest.mark.parametrize(
    ("template", "written"), [(MAY_THINK, "<think>\nhm</think>\n\nyes"), (THINKS, "hm</think>yes")]
)
def test_thoughts_are_told_apart(tmp_path: Path, template: str, written: str) -> None:
    whole, ended = read(writer_of(tmp_path, template).prepare(chat()), written)

    assert (whole.text, whole.reasoning) == ("yes", "hm")
    assert 0 < ended.reasoning_tokens < len(ids_of(written))


def test_a_form_comes_after_a_thought_that_the_prompt_opened(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, OPENS_THOUGHTS)

    assert "thought_end" in writer.prepare(chat(form="json_object")).grammar.rules
    assert "thought_end" not in writer.prepare(Generate(prompt="x", form="json_object")).grammar.rules


def test_a_text_without_a_template_is_all_text(tmp_path: Path) -> None:
    whole, _ = read(writer_of(tmp_path, MAY_THINK).prepare(Generate(prompt="x")), "<think>hm</think>yes")

    assert (whole.text, whole.reasoning) == ("<think>hm</think>yes", "")


def test_a_model_without_a_template_completes_and_does_not_chat(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, None)

    assert writer.prepare(Generate(prompt="hi")).input_tokens == 2
    with pytest.raises(InvalidRequest, match="/v1/completions"):
        writer.prepare(chat())


def test_log_probabilities_tell_bytes_and_leave_the_end_out(writer: Writer) -> None:
    reader = writer.prepare(chat(top_logprobs=1)).text()

    first = reader.push(ids_of("é")[:1], [-1.0], [[END]], [[-0.5]])
    last = reader.push([*ids_of("é")[1:], END], [-2.0, -0.1], [[END], [END]], [[-0.5], [-0.5]])

    assert first is None
    assert last is not None
    assert last.text == "é"
    assert b"".join(one.data for one in last.logprobs) == "é".encode()
    assert last.logprobs[0].top[0].data == b"<|end|>"
    assert [one.logprob for one in last.logprobs] == [-1.0, -2.0]


def told(prepared: Prepared, text: str) -> tuple[str, str, str]:
    """What is said, what the tokens spell that come with log-probabilities, and where it stopped."""
    reader = prepared.text()
    deltas = [reader.push([token], [-1.0]) for token in ids_of(text)]
    ended = reader.finish("stop")
    said = [delta for delta in [*deltas, ended.delta] if delta is not None]
    tokens = b"".join(one.data for delta in said for one in delta.logprobs)
    return "".join(delta.text for delta in said), tokens.decode(), ended.stop


CALL = '<tool_call>\n{"name": "get", "arguments": {"city": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "written", "said"),
    [
        (MAY_THINK, "<think>\nhm</think>\n\nyes", "yes"),
        (MAY_THINK, "<thin is no thought", "<thin is no thought"),
        (MAY_THINK, "yes", "yes"),
        (THINKS, "hm</think>yes", "yes"),
        (CHAT, f"I look. {CALL}", "I look. "),
        (CHAT, "a <tool> is not called", "a <tool> is not called"),
        (CHAT, '<tool_call>\n{"name": "nobody", "arguments": {}}', '<tool_call>\n{"name": "nobody", "arguments": {}}'),
        (CHAT, CALL, ""),
        (CHAT, "ends with <tool", "ends with <tool"),
    ],
)
def test_log_probabilities_are_of_what_is_said(tmp_path: Path, template: str, written: str, said: str) -> None:
    """And not of thoughts or calls, which the text that they come with does not have."""
    prepared = writer_of(tmp_path, template).prepare(chat(tools=TOOLS, top_logprobs=0))

    assert told(prepared, written) == (said, said, "")


def test_no_token_of_a_stop_string_is_told(writer: Writer) -> None:
    prepared = writer.prepare(chat(top_logprobs=0, stop=("END",)))

    assert told(prepared, "Be it END of it") == ("Be it ", "Be it ", "END")
    assert told(prepared, "it was the EN") == ("it was the EN", "it was the EN", "")


def test_a_stop_string_is_one_of_the_text_and_not_of_thoughts_or_calls(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, MAY_THINK)
    stops = ("\n", "Rome")

    whole, ended = read(writer.prepare(chat(stop=stops)), "<think>\nRome\nor not\n</think>\n\nNo.\nRome")
    assert (whole.reasoning, whole.text, ended.stop) == ("Rome\nor not", "No.", "\n")
    whole, ended = read(writer.prepare(chat(tools=TOOLS, stop=stops)), CALL)
    assert "".join(part.arguments for part in whole.calls) == '{"city": "Rome"}'
    assert (ended.finish, ended.stop) == ("tool_calls", "")


def test_a_text_that_stops_with_its_last_token_has_stopped(writer: Writer) -> None:
    whole, ended = read(writer.prepare(chat(stop=("END",))), "one END", is_ended=False)

    assert (whole.text, ended.finish, ended.stop) == ("one ", "stop", "END")


def test_what_may_become_a_stop_string_is_told_before_a_call(writer: Writer) -> None:
    whole, ended = read(writer.prepare(chat(tools=TOOLS, stop=("I will",))), f"I w{CALL}")

    assert (whole.text, len(whole.calls) > 0, ended.finish) == ("I w", True, "tool_calls")


def decided(writer: Writer, *questions: Question) -> list[tuple[str, Sequence[int]]]:
    task = Decide(json.dumps([{"role": "user", "content": "hi"}]).encode(), questions)
    return [
        (RUST.decode(np.frombuffer(one.ids, dtype="<i4").tolist(), skip_special_tokens=False), one.options)
        for one in writer.prepare_decide(task)
    ]


def test_questions_become_prompts_of_which_one_token_answers(writer: Writer) -> None:
    predicate, choice = decided(
        writer, Question("predicate", "It is <|end|>."), Question("choice", "Which?", ("red", "blue"))
    )

    assert predicate[0].startswith("user:hi<|end|>user:")
    assert "It is <|end|>." in predicate[0]
    assert list(predicate[1]) == [ids_of("Y")[0], ids_of("N")[0]]
    assert "A. red\nB. blue" in choice[0]
    assert list(choice[1]) == [ids_of("A")[0], ids_of("B")[0]]


def test_a_question_of_more_options_than_letters_is_refused(writer: Writer) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decided(writer, Question("choice", "Which?", tuple(map(str, range(27)))))

    assert caught.value.param == "questions"


@pytest.mark.parametrize(
    ("template", "end"), [(THINKS, "only.<|end|>"), (OPENS_THOUGHTS, "only.<|end|><think>\n</think>\n\n")]
)
def test_a_decision_is_not_a_thought(tmp_path: Path, template: str, end: str) -> None:
    [(prompt, _)] = decided(writer_of(tmp_path, template), Question("predicate", "It is."))

    assert prompt.endswith(end)


def test_a_vocabulary_without_yes_and_no_is_not_asked(tmp_path: Path) -> None:
    letters = {"<unk>": 0, "▁": 1} | {chr(code): code for code in range(33, 127)}
    rust = RustTokenizer(models.BPE(letters, [], unk_token="<unk>"))
    rust.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    rust.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])

    with pytest.raises(InvalidRequest, match="Yes from No"):
        decided(writer_of(tmp_path, rust=rust), Question("predicate", "It is."))


def test_what_needs_no_engine_is_answered_at_once(writer: Writer) -> None:
    tokens = writer.answer_at_once(Tokenize("hi"))

    assert writer.answer_at_once(Detokenize(tuple(ids_of("hi")))) == Text("hi")
    assert getattr(tokens, "ids", ()) == tuple(ids_of("hi"))
    with pytest.raises(InvalidRequest) as caught:
        writer.answer_at_once(Embed(("x",)))
    assert caught.value.param == "model"


@pytest.mark.parametrize("config", [{"chat_template": "{% for %}"}, {"chat_template": 7}])
def test_a_folder_that_cannot_be_used_stops_the_start(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(StartupError, match="cannot be written with"):
        writer_of(tmp_path, **config)


def test_an_engines_own_limit_bounds_prompts(writer: Writer) -> None:
    writer.narrow(20)

    assert writer.prepare(Generate(prompt="0123456789")).tokens_max == 10
    with pytest.raises(TooLong):
        writer.prepare(Generate(prompt="x" * 20))


# As Gemma 2's does: no system, and nobody speaks twice.
BY_TURNS = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{{ message.role }}:{{ message.content }}<|end|>{% endfor %}"
)


def test_what_a_template_refuses_is_said_plainer(tmp_path: Path) -> None:
    writer = writer_of(tmp_path, BY_TURNS)
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "hi"}]

    assert prompt_of(writer.prepare(Generate(messages=json.dumps(messages).encode()))) == ("user:Be kind.\n\nhi<|end|>")
    with pytest.raises(InvalidRequest, match="must alternate") as caught:
        writer.prepare(Generate(messages=json.dumps([{"role": "assistant", "content": "hi"}]).encode()))
    assert caught.value.param == "messages"


def test_a_question_is_asked_of_models_who_take_one_message_at_a_time(tmp_path: Path) -> None:
    decide = Decide(chat("I love it!").messages, (Question("predicate", "It is praise."),))

    (weighing,) = writer_of(tmp_path, BY_TURNS).prepare_decide(decide)

    prompt = RUST.decode(np.frombuffer(weighing.ids, dtype="<i4").tolist(), skip_special_tokens=False)
    assert prompt.startswith("user:I love it!\n\nIs the following true")
