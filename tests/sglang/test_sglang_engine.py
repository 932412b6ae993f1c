"""SGLang for real, on the CPU: what the adapter gives of a text is what the model says, and nothing is left behind."""

import json
import signal
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from appliance.jobs import Sampling
from appliance.workers.engines.sglang.answers import UNFIT
from appliance.workers.wire import Fault, Load, Loaded
from tests.appliance_process import wait_gone
from tests.sglang.conftest import SEQUENCES
from tests.sglang.driver import Driver
from tests.sglang.reference import Reference

pytestmark = [pytest.mark.sglang, pytest.mark.slow]

GONE_S = 10.0
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}


@pytest.fixture(scope="session")
def reference(smollm2: Path) -> Reference:
    return Reference(smollm2)


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture
def end_id(tokenizer: Tokenizer) -> int:
    found = tokenizer.token_to_id("<|im_end|>")
    assert found is not None
    return found


def chat(tokenizer: Tokenizer, text: str) -> list[int]:
    prompt = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    return list(tokenizer.encode(prompt, add_special_tokens=False).ids)


def test_it_holds_one_model(engine: Driver) -> None:
    loaded = engine.load(Load("other", "/nowhere", "float32", "cpu", 1, task="generate"))

    assert isinstance(loaded, Fault)
    assert "one model" in loaded.message


def test_the_most_probable_text_is_that_of_transformers(
    engine: Driver, reference: Reference, tokenizer: Tokenizer, end_id: int
) -> None:
    prompt = chat(tokenizer, "What is the capital of France?")

    written = engine.whole(engine.begin(prompt, tokens_max=24))

    assert written.ids == reference.greedy(prompt, 24, ends=[end_id])
    assert written.parts > 1, "it was not streamed"


def test_a_text_ends_at_its_end(engine: Driver, tokenizer: Tokenizer, end_id: int) -> None:
    prompt = chat(tokenizer, "What is the capital of France?")
    own = engine.whole(engine.begin(prompt, tokens_max=100))
    chosen = engine.whole(engine.begin(prompt, tokens_max=100, stop_ids=(own.ids[3],)))
    limited = engine.whole(engine.begin(prompt, tokens_max=2))

    assert (own.finish, own.ids[-1]) == ("stop", end_id)
    assert (chosen.finish, chosen.ids) == ("stop", own.ids[: own.ids.index(own.ids[3]) + 1])
    assert (limited.finish, limited.ids) == ("length", own.ids[:2])


def test_eight_texts_at_once_are_those_of_one_after_the_other(engine: Driver, tokenizer: Tokenizer) -> None:
    prompts = [chat(tokenizer, f"Count from {number} to ten.") for number in range(SEQUENCES)]
    alone = [engine.whole(engine.begin(prompt, tokens_max=20)).ids for prompt in prompts]
    first_step = len(engine.steps)

    together = [engine.whole(number).ids for number in [engine.begin(prompt, tokens_max=20) for prompt in prompts]]

    assert together == alone
    steps = engine.steps[first_step:]
    assert max(step.running for step in steps) >= SEQUENCES // 2
    assert any(len({grown.sequence for grown in step.grown}) > 1 for step in steps), "no step had two texts"
    assert any(engine.written[number].cached for number in list(engine.written)[-SEQUENCES:])


def test_an_abort_frees_the_place(engine: Driver, tokenizer: Tokenizer, end_id: int) -> None:
    endless = Sampling(temperature=0, logit_bias=((end_id, -100.0),))
    prompt = chat(tokenizer, "Tell me a very long story.")
    full = [engine.begin(prompt, tokens_max=900, sampling=endless) for _ in range(SEQUENCES)]
    for number in full:
        engine.wait_for_ids(number, 1)
    waiting = engine.begin(prompt, tokens_max=2)
    before = [len(engine.written[number].ids) for number in full]

    engine.abort(*full[:-1])
    written = engine.whole(waiting)
    after = [len(engine.written[number].ids) for number in full]
    engine.abort(full[-1], 10_000)

    assert written.finish == "length"
    assert not any(engine.written[number].finish for number in full)
    assert max(new - old for new, old in zip(after[:-1], before[:-1], strict=True)) <= 8
    assert engine.whole(engine.begin(prompt, tokens_max=1)).finish == "length"


def test_an_abort_right_behind_its_begin_is_heard(engine: Driver, tokenizer: Tokenizer) -> None:
    prompt = chat(tokenizer, "Tell me a long story.")
    for _ in range(2 * SEQUENCES):
        engine.abort(engine.begin(prompt, tokens_max=900))

    written = engine.whole(engine.begin(prompt, tokens_max=4))

    assert len(written.ids) == 4


def test_a_schema_is_followed(engine: Driver, tokenizer: Tokenizer, end_id: int) -> None:
    grammar = json.dumps({"grammars": [{"json_schema": SCHEMA}]})
    prompt = chat(tokenizer, "Invent a person. Answer in JSON.")
    hot = Sampling(temperature=1.5)
    numbers = [engine.begin(prompt, tokens_max=80, grammar=grammar, sampling=hot) for _ in range(4)]
    free = engine.begin(prompt, tokens_max=8)

    for written in map(engine.whole, numbers):
        assert written.finish == "stop"
        person = json.loads(tokenizer.decode(written.ids, skip_special_tokens=True))
        assert person.keys() == {"name", "age"}
        assert len(person["name"]) <= 12
        assert 0 <= person["age"] <= 99
    assert len(engine.whole(free).ids) == 8


def test_a_grammar_of_two_parts_is_followed(engine: Driver, tokenizer: Tokenizer) -> None:
    """Of the kind that tool calls make, which SGLang has no words for."""
    lark = 'start: "<call>" body "</call>"\nbody: @body'
    grammar = json.dumps(
        {"grammars": [{"lark_grammar": lark}, {"name": "body", "json_schema": {"enum": ["red", "green"]}}]}
    )

    written = engine.whole(engine.begin(chat(tokenizer, "Name a colour."), tokens_max=40, grammar=grammar))

    assert tokenizer.decode(written.ids, skip_special_tokens=True) in {
        '<call>"red"</call>',
        '<call>"green"</call>',
    }


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        ('{"grammars":[{"lark_grammar":"start: nothing"}]}', "nothing"),
        ('{"grammars":[{"json_schema":{"type":"wrong"}}]}', "wrong"),
        ("root ::= 'a'", "JSON"),
    ],
)
def test_a_bad_grammar_is_a_fault_of_its_own_text(
    engine: Driver, tokenizer: Tokenizer, grammar: str, word: str
) -> None:
    prompt = chat(tokenizer, "Hi.")

    bad, good = engine.begin(prompt, grammar=grammar), engine.begin(prompt, tokens_max=3)

    assert engine.whole(bad).finish == "refused"
    assert word in engine.whole(bad).fault
    assert len(engine.whole(good).ids) == 3


def test_a_grammar_that_gets_too_complex_is_the_requests_fault_and_no_end(engine: Driver, tokenizer: Tokenizer) -> None:
    """llguidance then allows nothing but the end of the text, which must not be taken for it."""
    rule = "/x{12}(a|b|c|.{0,9}){60}(.*[a-m].{40}){3}/"
    grammar = json.dumps({"grammars": [{"lark_grammar": f"%llguidance {{}}\nstart: {rule}"}]})
    prompt = chat(tokenizer, "Hi.")

    bad, good = engine.begin(prompt, grammar=grammar, tokens_max=40), engine.begin(prompt, tokens_max=9)

    written = engine.whole(bad)
    assert written.finish == "refused"
    assert written.fault.startswith(UNFIT)
    assert tokenizer.decode(written.ids) == "x" * 12, "it fails after these"
    assert len(engine.whole(good).ids) == 9


def test_log_probabilities_are_those_of_the_model(engine: Driver, reference: Reference, tokenizer: Tokenizer) -> None:
    prompt = chat(tokenizer, "What is water?")

    warm = engine.whole(engine.begin(prompt, tokens_max=3, top_logprobs=4, sampling=Sampling(temperature=1.7)))
    bare = engine.whole(engine.begin(prompt, tokens_max=2, top_logprobs=0))

    for place, (chosen, logprob, top) in enumerate(zip(warm.ids, warm.logprobs, warm.tops, strict=True)):
        expected = reference.logprobs([*prompt, *warm.ids[:place]])
        assert logprob == pytest.approx(float(expected[chosen]), abs=2e-3)
        best = expected.topk(4)
        assert list(top) == best.indices.tolist()
        assert list(top.values()) == pytest.approx(best.values.tolist(), abs=2e-3)
    assert len(bare.logprobs) == 2
    assert bare.tops == [{}, {}]


def test_weighed_tokens_are_the_next_ones(engine: Driver, reference: Reference, tokenizer: Tokenizer) -> None:
    prompt = chat(tokenizer, "Is fire hot? Answer yes or no.")
    yes, no = (tokenizer.encode(word, add_special_tokens=False).ids[0] for word in ("Yes", "No"))

    written = engine.whole(engine.begin(prompt, tokens_max=1, weighed=(no, yes, no)))

    expected = reference.logprobs(prompt)
    assert written.ids == []
    assert written.finish == "stop"
    assert written.logprobs == pytest.approx([float(expected[id_]) for id_ in (no, yes, no)], abs=2e-3)


def test_a_bias_decides(engine: Driver, tokenizer: Tokenizer) -> None:
    wanted = tokenizer.encode(" zebra", add_special_tokens=False).ids[0]

    written = engine.whole(
        engine.begin(chat(tokenizer, "Hi."), tokens_max=3, sampling=Sampling(0, logit_bias=((wanted, 100.0),)))
    )

    assert written.ids == [wanted] * 3


@pytest.mark.parametrize(
    ("ids", "options", "word"),
    [
        ([10**6], {}, "vocabulary"),
        ([-1], {}, "vocabulary"),
        ([], {}, "no tokens"),
        ([1] * 1020, {"tokens_max": 10}, "over"),
        ([1], {"weighed": (10**6,)}, "vocabulary"),
        ([1], {"sampling": Sampling(logit_bias=((10**6, 1.0),))}, "vocabulary"),
        ([1], {"sampling": Sampling(repetition_penalty=3.0)}, "penalty"),
        ([1], {"adapter": "nobody"}, "adapter"),
    ],
)
def test_what_would_harm_the_server_never_gets_there(
    engine: Driver, ids: list[int], options: dict[str, object], word: str
) -> None:
    written = engine.whole(engine.begin(ids, **options))  # type: ignore[arg-type]  # each of its own type

    assert (written.finish, word in written.fault) == ("fault", True), written
    assert engine.whole(engine.begin([1], tokens_max=1)).finish == "length"


@pytest.mark.parametrize(
    "sampling", [Sampling(top_p=0.0), Sampling(top_k=1), Sampling(temperature=0.0, seed=2**64 - 1)]
)
def test_every_way_to_say_greedy(engine: Driver, tokenizer: Tokenizer, sampling: Sampling) -> None:
    prompt = chat(tokenizer, "What is ice?")
    expected = engine.whole(engine.begin(prompt, tokens_max=6)).ids

    assert engine.whole(engine.begin(prompt, tokens_max=6, sampling=sampling)).ids == expected


def test_it_stops_when_told_and_leaves_nothing(command: list[str], order: Load) -> None:
    with Driver(command) as driver:
        assert isinstance(driver.load(order), Loaded)
        family = driver.family()
        assert len(family) >= 4, "the adapter and three processes of SGLang"
        arguments = " ".join(" ".join(process.cmdline()) for process in family)

    assert driver.wait_gone() == 0
    assert wait_gone(family, within_s=GONE_S) == []
    assert "api" not in arguments.replace("appliance", ""), "the key can be seen by all"


def test_killed_itself_it_takes_the_server_along(command: list[str], order: Load) -> None:
    with Driver(command) as driver:
        assert isinstance(driver.load(order), Loaded)
        family = driver.family()
        number = driver.begin([1, 2, 3], tokens_max=900)
        driver.wait_for_ids(number, 1)

        driver.process.kill()

        assert wait_gone(family, within_s=GONE_S) == []


def test_when_the_server_is_killed_it_ends_and_says_so(command: list[str], order: Load) -> None:
    with Driver(command) as driver:
        assert isinstance(driver.load(order), Loaded)
        family = driver.family()
        number = driver.begin([1, 2, 3], tokens_max=900)
        driver.wait_for_ids(number, 1)
        (server,) = [process for process in family if process.ppid() == driver.process.pid]

        server.send_signal(signal.SIGKILL)

        assert driver.wait_gone() == 3
        assert wait_gone(family, within_s=GONE_S) == []
    assert "SGLang ended (killed by signal 9)" in "".join(driver.output)


def test_a_flag_that_sglang_refuses_is_named(command: list[str], order: Load) -> None:
    wrong = msgspec.structs.replace(order, flags={"schedule-policy": "sideways"})
    with Driver(command) as driver:
        answer = driver.load(wrong)

    assert isinstance(answer, Fault)
    assert (answer.code, "sideways" in answer.message) == ("invalid", True), answer


def test_a_node_that_goes_while_it_loads_leaves_nothing(command: list[str], order: Load) -> None:
    with Driver(command) as driver:
        driver.send(order)
        driver.wait_for_child()
        family = driver.family()

    assert driver.wait_gone() == 0
    assert wait_gone(family, within_s=GONE_S) == []
