"""Chat templates as transformers renders them, and what they may not do."""

import json
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from appliance.errors import InvalidRequest
from appliance.workers.writing.chat_template import ChatTemplate
from appliance.workers.writing.messages import Message, by_turns, normalized, spelled_out
from tests.unit.test_text_stream import byte_level

PLAIN = """{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}"""
WITH_TOOLS = """{{- bos_token }}
{%- if tools %}
    {%- for tool in tools %}{{ tool | tojson }}{% endfor %}
    {{- tools[0] | tojson(indent=2) }}{{ tools[0] | tojson(true, sort_keys=true, separators=(',', ':')) }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'skipped' %}{% continue %}{% endif %}
    {%- generation %}{{ message.content | trim }}{% endgeneration %}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name }}({{ call.function.arguments.items() | list }})
    {%- endfor %}
{%- endfor %}"""
TOOLS = [{"type": "function", "function": {"name": "f", "description": "<b>'é'", "parameters": {"type": "object"}}}]
MESSAGES: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " Hi & <bye> "},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
    },
    {"role": "tool", "content": "42", "tool_call_id": "1"},
]


@pytest.mark.parametrize("source", [PLAIN, WITH_TOOLS])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a_prompt_is_what_transformers_makes_of_it(source: str, tools: list[dict[str, object]]) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level(), chat_template=source, bos_token="<s>")
    expected = theirs.apply_chat_template(MESSAGES, tools=tools or None, add_generation_prompt=True, tokenize=False)

    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, tools) == expected


@pytest.mark.parametrize(
    ("config", "source"),
    [
        ({"chat_template": "A"}, "A"),
        ({"chat_template": [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]}, "D"),
        ({"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]}, "T"),
    ],
)
def test_templates_lie_where_transformers_puts_them(config: dict[str, object], source: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = ChatTemplate.load(tmp_path)
    assert found is not None
    assert found.source == source

    (tmp_path / "chat_template.jinja").write_text("own file")
    found = ChatTemplate.load(tmp_path)
    assert found is not None
    assert found.source == "own file"


def test_a_folder_may_have_no_template(tmp_path: Path) -> None:
    assert ChatTemplate.load(tmp_path) is None


def test_special_tokens_come_as_strings_or_objects(tmp_path: Path) -> None:
    config = {"chat_template": "{{ bos_token }}{{ eos_token }}", "bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))

    found = ChatTemplate.load(tmp_path)

    assert found is not None
    assert found.render([]) == "<s></s>"


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% generation %}"])
def test_a_broken_template_is_the_models_fault(source: str) -> None:
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(source, {})


@pytest.mark.parametrize(
    "source",
    [
        "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[9].content }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_what_a_template_may_not_do_refuses_the_request(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ChatTemplate(source, {}).render(MESSAGES)

    assert caught.value.param == "messages"


def test_a_templates_own_words_reach_the_client() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}", {}).render([])


def test_messages_become_what_templates_know() -> None:
    messages: list[Message] = [
        {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "user", "content": "c", "name": "x"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}],
        },
        {"role": "assistant", "content": None, "function_call": {"name": "g", "arguments": ""}},
        {"role": "function", "name": "g", "content": "r"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "assistant", "content": None, "refusal": "never"},
    ]

    found = normalized(messages)

    assert [message["role"] for message in found] == [
        "system",
        "user",
        "assistant",
        "assistant",
        "tool",
        *["assistant"] * 2,
    ]
    assert [message["content"] for message in found] == ["a\nb", "c", "", "", "r", "no", "never"]
    assert found[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}
    assert found[3]["tool_calls"][0]["function"] == {"name": "g", "arguments": {}}


def test_calls_that_are_told_in_both_ways_keep_their_ids() -> None:
    function = {"name": "f", "arguments": "{}"}
    call = {"id": "1", "type": "function", "function": function}
    [found] = normalized([{"role": "assistant", "content": None, "tool_calls": [call], "function_call": function}])

    assert [made["id"] for made in found["tool_calls"]] == ["1"]


def test_what_no_template_reads_is_left_out() -> None:
    call = {"id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}", "x": [[]]}}
    message: Message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [call],
        "refusal": None,
        "x": [[]],
        "name": 7,
    }

    [found] = normalized([message])

    assert found == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}],
    }


@pytest.mark.parametrize("has_short_ids", [False, True])
def test_a_result_is_known_by_its_call(has_short_ids: bool) -> None:
    call = {"id": "call_0123456789", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[Message] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0123456789", "content": "42"},
        {"role": "tool", "tool_call_id": "of another", "content": "43"},
    ]

    asked, answered, other = normalized(messages, has_short_ids=has_short_ids)

    assert answered["name"] == "f"
    assert "name" not in other
    assert answered["tool_call_id"] == asked["tool_calls"][0]["id"]
    assert (len(answered["tool_call_id"]) == 9 and answered["tool_call_id"].isalnum()) == has_short_ids
    assert other["tool_call_id"] != answered["tool_call_id"]


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("Tool call IDs should be alphanumeric strings with length 9!", "has_short_ids"),
        ("Tool call IDs should be alphanumeric strings with length >= 9! (1)", "has_short_ids"),
        ("This model only supports single tool-calls at once!", "has_single_calls"),
    ],
)
def test_what_a_template_would_refuse_is_known(words: str, fact: str) -> None:
    assert getattr(ChatTemplate(f"{{{{ raise_exception('{words}') }}}}", {}), fact)
    assert not getattr(ChatTemplate(PLAIN, {}), fact)


def test_a_template_may_know_no_system() -> None:
    assert ChatTemplate(PLAIN, {}).has_system
    assert not ChatTemplate("{{ raise_exception('System role not supported') }}", {}).has_system


def test_functions_are_told_by_the_user_where_there_is_no_system() -> None:
    [first, *rest] = spelled_out(normalized(MESSAGES[1:]), TOOLS, has_system=False)

    assert first["role"] == "user"
    assert first["content"].startswith("You may call")
    assert first["content"].endswith("\n\n Hi & <bye> ")
    assert [message["role"] for message in rest] == ["assistant", "user"]
    assert spelled_out([], TOOLS, has_system=False)[0]["role"] == "user"


def test_the_narrowest_templates_have_a_user_and_an_assistant_by_turns() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = normalized(
        [
            {"role": "system", "content": "Be kind."},
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": "Hi"},
            {"role": "system", "content": "It is late."},
            {"role": "user", "content": "there"},
            {"role": "assistant", "content": "I look.", "tool_calls": [call]},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "1"},
            {"role": "tool", "tool_call_id": "c", "content": "2"},
        ]
    )

    system, user, assistant, *results = by_turns(messages, has_system=True)
    assert system == {"role": "system", "content": "Be kind.\n\nBe brief."}
    assert user == {"role": "user", "content": "Hi\n\nIt is late.\n\nthere"}
    assert assistant["content"] == "I look."
    assert len(assistant["tool_calls"]) == 2
    assert results == messages[-2:]
    assert by_turns(messages, has_system=False)[0] == {
        "role": "user",
        "content": "Be kind.\n\nBe brief.\n\nHi\n\nIt is late.\n\nthere",
    }


def test_results_of_several_calls_are_one_message() -> None:
    results: list[Message] = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]

    found = spelled_out([*results, {"role": "user", "content": "3"}], [])

    assert [message["content"] for message in found] == [
        "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>",
        "3",
    ]


def test_a_template_may_be_asked_for_an_answer_at_once() -> None:
    template = ChatTemplate("{% if enable_thinking is defined and enable_thinking is false %}at once{% endif %}", {})

    assert template.render(MESSAGES) == ""
    assert template.render(MESSAGES, may_think=False) == "at once"


@pytest.mark.parametrize(
    "arguments", ["{", "[1]", '"x"', "[" * 5000, '{"a": NaN}', r'{"a": "\ud800"}', '{"a":' * 65 + "1" + "}" * 65]
)
def test_arguments_that_are_no_object_are_refused_by_name(arguments: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}

    with pytest.raises(InvalidRequest) as caught:
        normalized([{"role": "assistant", "content": "", "tool_calls": [call]}])

    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize("first", [[], [{"role": "system", "content": "Be brief."}]])
def test_functions_are_spelled_out_for_templates_that_know_none(first: list[Message]) -> None:
    found = spelled_out([*first, *normalized(MESSAGES[1:])], TOOLS)

    assert found[0]["role"] == "system"
    assert found[0]["content"].startswith("Be brief." if first else "You may call")
    assert json.dumps(TOOLS[0], ensure_ascii=False) in found[0]["content"]
    assert found[-2] == {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    }
    assert found[-1] == {"role": "user", "content": "<tool_response>\n42\n</tool_response>"}
