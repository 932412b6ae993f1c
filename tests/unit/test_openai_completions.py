"""`POST /v1/completions`: what is refused, what a body becomes, and answers as OpenAI's client reads them."""

import json
from collections.abc import Sequence
from typing import Any

import httpx2
import msgspec
import openai
import pytest
from bpe_openai import get_encoding
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion

from appliance.compat import formats
from appliance.compat.generation import Gathering, Generated
from appliance.compat.openai_chat import CHOICES_MAX
from appliance.compat.openai_completions import (
    CHOICES_IN_ALL_MAX,
    LOGPROBS_MAX,
    PROMPTS_MAX,
    TOKENS_MAX,
    CompletionAnswer,
    CompletionBody,
    CompletionCall,
    decode,
)
from appliance.compat.sampling import STOPS_MAX
from appliance.compat.token_ids import ARRAY_IDS_MAX
from appliance.errors import ApplianceError, EngineFailed, InvalidRequest, MalformedBody, UnsupportedParameter
from appliance.jobs import Candidate, Chosen, Delta, Done, Generate, Sampling, Usage

Json = dict[str, Any]  # `Any`: JSON
Story = tuple[Sequence[Delta], Done]

USAGE = Usage(input_tokens=7, output_tokens=5, cached_tokens=4)
TOLD: Json = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "total_tokens": 12,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
# "a€b" in four tokens, of which two are the euro.
EURO = (
    Chosen(b"a", -0.5, (Candidate(b"a", -0.5), Candidate(b" a", -1.5))),
    Chosen(b"\xe2\x82", -0.25, (Candidate(b"\xe2", -0.125),)),
    Chosen(b"\xac", 0.0, (Candidate(b"\xac", 0.0),)),
    Chosen(b"b", -1.0, ()),
)
LOGPROBS: Json = {
    "tokens": ["a", "bytes:\\xe2\\x82", "bytes:\\xac", "b"],
    "token_logprobs": [-0.5, -0.25, 0.0, -1.0],
    "top_logprobs": [
        {"a": -0.5, " a": -1.5},
        {"bytes:\\xe2": -0.125, "bytes:\\xe2\\x82": -0.25},
        {"bytes:\\xac": 0.0},
        {"b": -1.0},
    ],
    "text_offset": [0, 1, 1, 2],
}

SAID: Story = ([Delta("Hel"), Delta("lo")], Done(USAGE))
CUT: Story = ([Delta("Hel")], Done(USAGE, finish="length"))
NOTHING: Story = ([], Done(USAGE))
WEIGHED: Story = ([Delta("a", logprobs=EURO[:2]), Delta("€b", logprobs=EURO[2:])], Done(USAGE))
STORIES = [SAID, CUT, NOTHING, WEIGHED]


def body(**fields: object) -> bytes:
    """A valid body with these fields laid over it."""
    return json.dumps({"model": "m", "prompt": "Once"} | fields).encode()


def read(**fields: object) -> CompletionCall:
    return decode(body(**fields))


def task(**fields: object) -> Generate:
    (found,) = read(**fields).tasks
    return found


def prompts(prompt: object, **fields: object) -> list[str]:
    return [each.prompt for each in read(prompt=prompt, **fields).tasks]


def gathered(story: Story) -> Generated:
    gathering = Gathering()
    for delta in story[0]:
        gathering.add(delta)
    return gathering.whole(story[1])


@pytest.mark.parametrize(
    "sent", [b"", b"[]", b"{", b'{"model":"m","prompt":"\xff"}', b'{"model":"m","prompt":"\\ud800"}']
)
def test_what_is_no_json_object_is_malformed(sent: bytes) -> None:
    with pytest.raises(MalformedBody, match="the request body"):
        decode(sent)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": None}, "model"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt"),
        ({"prompt": ["a", [5]]}, "prompt"),
        ({"prompt": [5, "a"]}, "prompt"),
        ({"prompt": [5, [5]]}, "prompt"),
        ({"prompt": [[5], "a"]}, "prompt[1]"),
        ({"prompt": [[5], 5]}, "prompt[1]"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": [[5], []]}, "prompt[1]"),
        ({"prompt": [["a"]]}, "prompt[0][0]"),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [5] * (ARRAY_IDS_MAX + 1)}, "prompt"),
        ({"prompt": [[5], [5] * (ARRAY_IDS_MAX + 1)]}, "prompt[1]"),
        ({"prompt": [[5] * ARRAY_IDS_MAX] * 37}, "prompt"),
        ({"prompt": ["a"] * (PROMPTS_MAX + 1)}, "prompt"),
        ({"prompt": [[5]] * (PROMPTS_MAX + 1)}, "prompt"),
        ({"prompt": ["a"] * (CHOICES_IN_ALL_MAX // CHOICES_MAX + 1), "n": CHOICES_MAX}, "n"),
        ({"n": CHOICES_MAX + 1}, "n"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": LOGPROBS_MAX + 1}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["a"] * (STOPS_MAX + 1)}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"seed": 2**64}, "seed"),
        ({"echo": True, "logprobs": 0}, "echo"),
        ({"repetition_penalty": 1e-300}, "repetition_penalty"),
        ({"echo": 1}, "echo"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_bad_fields_are_refused_by_name(fields: Json, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(**fields)
    assert caught.value.param == param
    assert "input" not in caught.value.message.replace("first input", "")
    assert len(caught.value.message) < 500


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 3, "n": 2}, "best_of"),
        ({"model": "davinci", "prompt": [5]}, "prompt"),
    ],
)
def test_what_is_not_served_is_refused_by_name(fields: Json, param: str) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        read(**fields)
    assert caught.value.param == param
    assert f"'{param}'" in caught.value.message


NULLABLE = sorted(set(CompletionBody.__struct_fields__) - {"model", "prompt"})


def test_explicit_nulls_mean_absent() -> None:
    found = read(**dict.fromkeys(NULLABLE))
    assert found.tasks == read().tasks
    assert (found.is_streamed, found.ignored) == (False, ())


def test_a_bare_body_gets_sixteen_tokens() -> None:
    assert TOKENS_MAX == 16
    assert task() == Generate(prompt="Once", tokens_max=16)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": 99}, {"tokens_max": 99}),
        ({"logprobs": 0}, {"top_logprobs": 0}),
        ({"logprobs": 5}, {"top_logprobs": 5}),
        ({"stop": "a"}, {"stop": ("a",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"stream": True}, {"is_streamed": True}),
        ({"suffix": "", "best_of": 1, "user": "u", "echo": True}, {}),
        ({"temperature": 0, "seed": 5}, {"sampling": Sampling(temperature=0, seed=5)}),
        ({"top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"sampling": Sampling(top_p=0.5, top_k=3, min_p=0.1)}),
        (
            {"presence_penalty": 1, "frequency_penalty": -1, "repetition_penalty": 1.5},
            {"sampling": Sampling(presence_penalty=1, frequency_penalty=-1, repetition_penalty=1.5)},
        ),
        ({"logit_bias": {"5": 1}}, {"sampling": Sampling(logit_bias=((5, 1.0),))}),
    ],
)
def test_what_fields_become(fields: Json, expected: Json) -> None:
    assert task(**fields) == msgspec.structs.replace(task(), **expected)


def test_choices_of_a_prompt_follow_each_other() -> None:
    found = read(prompt=["a", "b"], n=2, best_of=2, seed=5).tasks
    assert [(each.prompt, each.sampling.seed) for each in found] == [("a", 5), ("a", 6), ("b", 5), ("b", 6)]
    assert len(read(prompt=["a"] * PROMPTS_MAX).tasks) == PROMPTS_MAX
    assert len(read(prompt=["a"] * (CHOICES_IN_ALL_MAX // CHOICES_MAX), n=CHOICES_MAX).tasks) == CHOICES_IN_ALL_MAX


@pytest.mark.slow  # the tables take two seconds
def test_ids_are_read_by_the_encoding_of_the_name() -> None:
    cl100k, o200k = (get_encoding(name).encode_ordinary for name in ("cl100k_base", "o200k_base"))
    assert prompts(cl100k("Es war einmal 日本")) == ["Es war einmal 日本"]
    assert prompts([cl100k("a b"), cl100k("c")]) == ["a b", "c"]
    assert prompts(o200k("Es war einmal"), model="gpt-4o") == ["Es war einmal"]
    for ids in ([-1], [100261], [10**30]):
        with pytest.raises(InvalidRequest, match="'prompt\\[0\\]' holds numbers that are no token ids") as caught:
            prompts(ids)
        assert caught.value.param == "prompt[0]"


def test_unknown_fields_are_named() -> None:
    assert read(guided_json={}, metadata={}).ignored == ("guided_json",)


def stream_of(call: CompletionCall, *stories: Story, error: ApplianceError | None = None) -> bytes:
    """The bytes of a stream, a choice after the other; an error may end it in place of the end."""
    writer = call.writer(model="m", created_s=123)
    told = [writer.start()]
    for number, (deltas, done) in enumerate(stories):
        told += [writer.delta(number, delta) for delta in deltas]
        told += [] if error is not None else [writer.finish(number, done)]
    return b"".join([*told, writer.end() if error is None else writer.error(error)])


def client_for(content: bytes, content_type: str, *, is_strict: bool = True) -> openai.OpenAI:
    """OpenAI's client, which reads this from whatever it asks."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, content=content, headers={"content-type": content_type})

    return openai.OpenAI(
        api_key="k",
        base_url="http://localhost/v1",
        max_retries=0,
        http_client=httpx2.Client(transport=httpx2.MockTransport(answer)),
        _strict_response_validation=is_strict,
    )


def written(*stories: Story, **fields: object) -> bytes:
    """The answer as it is sent."""
    answer = read(**fields).answer([gathered(story) for story in stories], model="m", created_s=123)
    return formats.encode(answer, "json")


def answered(*stories: Story, **fields: object) -> Completion:
    """The answer as OpenAI's client reads it."""
    with client_for(written(*stories, **fields), "application/json") as client:
        return client.completions.create(model="m", prompt="Once")


def streamed(*stories: Story, error: ApplianceError | None = None, **fields: object) -> list[Completion]:
    """The chunks as OpenAI's client reads them; its strict type wants a reason to end in each of them."""
    content = stream_of(read(stream=True, **fields), *stories, error=error)
    with client_for(content, "text/event-stream", is_strict=False) as client:
        return list(client.completions.create(model="m", prompt="Once", stream=True))


def test_an_answer_to_the_letter() -> None:
    found = json.loads(written(SAID))
    assert found.pop("id").startswith("cmpl-")
    assert found == {
        "object": "text_completion",
        "created": 123,
        "model": "m",
        "choices": [{"text": "Hello", "index": 0, "logprobs": None, "finish_reason": "stop"}],
        "system_fingerprint": None,
        "usage": TOLD,
    }


@pytest.mark.parametrize("story", STORIES)
def test_answers_are_valid_to_openai(story: Story) -> None:
    (choice,) = answered(story, logprobs=2).choices
    assert (choice.text, choice.finish_reason) == (gathered(story).text, story[1].finish)


def test_log_probabilities_tell_where_tokens_begin() -> None:
    (choice,) = json.loads(written(WEIGHED, logprobs=2))["choices"]
    assert choice["text"] == "a€b"
    assert choice["logprobs"] == LOGPROBS
    assert json.loads(written(WEIGHED))["choices"][0]["logprobs"] is None
    assert json.loads(written(NOTHING, logprobs=0))["choices"][0]["logprobs"] == {
        "tokens": [],
        "token_logprobs": [],
        "top_logprobs": [],
        "text_offset": [],
    }


def test_tokens_are_told_with_where_they_begin() -> None:
    (choice,) = json.loads(written(WEIGHED, prompt="é: ", logprobs=2))["choices"]
    assert choice["text"] == "a€b"
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 2]


def test_each_prompt_counts_once() -> None:
    found = answered(SAID, CUT, SAID, NOTHING, prompt=["a", "b"], n=2, echo=True)
    assert [(choice.index, choice.text) for choice in found.choices] == [
        (0, "aHello"),
        (1, "aHel"),
        (2, "bHello"),
        (3, "b"),
    ]
    assert [choice.finish_reason for choice in found.choices] == ["stop", "length", "stop", "stop"]
    assert found.usage is not None
    usage = found.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (14, 20, 34)


def chunks(content: bytes) -> list[Json]:
    """The chunks of a stream that ends well, checked for its frame and for what they share."""
    assert content.endswith(b"\n\ndata: [DONE]\n\n")
    found: list[Json] = []
    for event in content.removesuffix(b"data: [DONE]\n\n").removesuffix(b"\n\n").split(b"\n\n"):
        assert event.startswith(b"data: ")
        assert b"\n" not in event
        found.append(json.loads(event[6:]))
    shared = {(chunk.pop("id"), chunk.pop("object"), chunk.pop("created"), chunk.pop("model")) for chunk in found}
    ((_, kind, created_s, model),) = shared
    assert (kind, created_s, model) == ("text_completion", 123, "m")
    return found


def said(text: str, index: int = 0, finish: str | None = None) -> Json:
    """A chunk, but for what all share."""
    choice = {"text": text, "index": index, "logprobs": None, "finish_reason": finish}
    return {"choices": [choice], "system_fingerprint": None}


def test_the_chunks_of_a_text() -> None:
    assert chunks(stream_of(read(stream=True), CUT)) == [said("Hel"), said("", finish="length")]


def test_echoes_are_streamed_first() -> None:
    call = read(stream=True, prompt=["a", "b"], echo=True)
    assert chunks(stream_of(call, CUT, CUT))[:3] == [said("a"), said("b", 1), said("Hel")]


def test_usage_comes_last_where_it_is_asked_for() -> None:
    call = read(stream=True, prompt=["a", "b"], stream_options={"include_usage": True})
    *parts, last = chunks(stream_of(call, SAID, CUT))
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["total_tokens"]) == (14, 24)
    assert all("usage" not in part for part in chunks(stream_of(read(stream=True), SAID)))


def test_choices_that_end_in_any_order_count_the_same() -> None:
    call = read(stream=True, prompt=["a", "b"], n=2, stream_options={"include_usage": True})
    writer = call.writer(model="m", created_s=123)
    content = writer.start()
    for choice in (3, 0, 2, 1):  # a prompt's tokens are those of its first choice
        content += writer.finish(choice, Done(Usage(input_tokens=10 if choice < 2 else 1, output_tokens=1)))
    usage = chunks(content + writer.end())[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (11, 4)


@pytest.mark.parametrize("story", STORIES)
def test_chunks_are_read_by_openai(story: Story) -> None:
    found = streamed(story, logprobs=1, stream_options={"include_usage": True})
    assert "".join(chunk.choices[0].text for chunk in found[:-1]) == gathered(story).text
    assert found[-1].usage is not None
    assert found[-1].usage.total_tokens == 12


def test_a_failure_in_mid_stream_is_raised_by_the_client() -> None:
    error = EngineFailed("the engine died")
    assert b"[DONE]" not in stream_of(read(stream=True), SAID, error=error)
    with pytest.raises(openai.APIError, match=error.message) as caught:
        streamed(SAID, error=error)
    assert caught.value.code == error.code


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.text(max_size=8), st.lists(st.integers(1, 5), max_size=10))
def test_a_stream_tells_the_places_that_the_whole_answer_tells(text: str, cuts: list[int]) -> None:
    """However the bytes of a text are cut into tokens; and a token's place is where its first character begins."""
    data, tokens = text.encode(), list[Chosen]()
    for cut in [*cuts, len(data)]:
        if data:
            tokens.append(Chosen(data[:cut], -1.0))
            data = data[cut:]
    deltas = [Delta(logprobs=(token,)) for token in tokens]
    fields: Json = {"logprobs": 0, "prompt": "Once"}
    whole = json.loads(written((deltas, Done()), **fields))["choices"][0]["logprobs"]["text_offset"]
    parts = chunks(stream_of(read(stream=True, **fields), (deltas, Done())))
    assert whole == [
        place for part in parts for place in (part["choices"][0]["logprobs"] or {"text_offset": []})["text_offset"]
    ]
    before = b""
    for token, place in zip(tokens, whole, strict=True):
        assert place == len(before.decode(errors="ignore"))
        before += token.data


# Of all levels, so that chance finds its way into them.
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 200)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["5", "include_usage", "x"]), inner),
    max_leaves=8,
)


def fault(fields: Json) -> str | None:
    """The field that is refused; None if the body is read, and answered."""
    try:
        call = read(**fields)
    except InvalidRequest as error:
        return (error.param or "").split(".")[0].split("[")[0]
    answer = call.answer([gathered(WEIGHED)] * len(call.tasks), model="m", created_s=1)
    Completion.model_validate_json(formats.encode(answer, "json"), strict=True)
    return None


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from([*NULLABLE, "prompt"]), JSON, min_size=1, max_size=3))
def test_whatever_is_sent_is_read_or_refused_by_name(fields: Json) -> None:
    """Never another exception, which would be a 500."""
    assert fault(fields) in {None, *fields}


def test_body_and_answer_have_a_schema() -> None:
    """As the OpenAPI document wants of them."""
    _, components = msgspec.json.schema_components([CompletionBody, CompletionAnswer])
    assert {"CompletionBody", "CompletionAnswer", "CompletionChoice"} <= set(components)
