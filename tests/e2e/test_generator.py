"""The embedded generator against transformers, and what holds of it whatever runs beside a text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from appliance.jobs import Sampling
from appliance.workers.engines.generator.engine import GeneratorEngine
from appliance.workers.engines.generator.places import CHUNK_TOKENS
from appliance.workers.engines.packed.config import CAUSAL
from appliance.workers.engines.packed.decoders import DECODERS
from appliance.workers.wire import Begin, Grown, Load
from tests.tiny_writers import FAMILIES, save_writer, vocabulary

pytestmark = pytest.mark.slow

GREEDY = Sampling(temperature=0.0)
NEVER = Sampling(temperature=0.0, logit_bias=((2, -100.0),))  # without the token that ends texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("writer")
    save_writer(path)
    return path


def loaded(folder: Path, *, dtype: str = "float32", places: int = 4) -> GeneratorEngine:
    engine = GeneratorEngine()
    engine.load(Load("m", str(folder), dtype, "cpu", 1, task="generate", sequences_max=places, tokens_max=512))
    return engine


@pytest.fixture
def engine(folder: Path) -> GeneratorEngine:
    return loaded(folder)


def tokens(length: int, *, seed: int = 0) -> list[int]:
    count = vocabulary().get_vocab_size()
    found: list[int] = np.random.default_rng(seed).integers(3, count, length).tolist()
    return found


def begin(number: int, ids: Sequence[int], **fields: Any) -> Begin:
    settings: dict[str, Any] = {"tokens_max": 24, "sampling": NEVER} | fields
    return Begin(number, "m", np.array(ids, dtype="<i4").tobytes(), **settings)


def run(engine: GeneratorEngine, *begins: Begin) -> dict[int, list[Grown]]:
    """Everything that comes of these, begun at once."""
    grown: dict[int, list[Grown]] = {one.sequence: [] for one in begins}
    for one in begins:
        engine.begin(one)
    while not engine.is_idle:
        for new in engine.step().grown:
            grown[new.sequence].append(new)
    assert all(found[-1].finish for found in grown.values())
    return grown


def ids_of(grown: Sequence[Grown]) -> list[int]:
    return [token for new in grown for token in new.ids]


def greedy(model: Any, ids: Sequence[int], count: int) -> list[int]:
    """transformers' own."""
    found = model.generate(
        torch.tensor([ids]), max_new_tokens=count, do_sample=False, suppress_tokens=[2], pad_token_id=2
    )
    return [int(token) for token in found[0, len(ids) :]]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_writes_what_transformers_writes(family: str, tmp_path: Path) -> None:
    model = save_writer(tmp_path, family)
    prompts = [tokens(length, seed=length) for length in (1, 5, CHUNK_TOKENS, CHUNK_TOKENS + 1, 200)]

    found = run(loaded(tmp_path), *(begin(number, ids) for number, ids in enumerate(prompts, 1)))

    for number, ids in enumerate(prompts, 1):
        assert ids_of(found[number]) == greedy(model, ids, 24), len(ids)


def test_log_probabilities_are_the_models(folder: Path, engine: GeneratorEngine) -> None:
    model = save_writer(folder)
    ids = tokens(20)

    found = run(engine, begin(1, ids, tokens_max=3, top_logprobs=2))[1]

    with torch.no_grad():
        logits = model(torch.tensor([ids + ids_of(found)])).logits[0, len(ids) - 1 : -1]
    expected = torch.log_softmax(logits, -1)
    for place, new in enumerate(found):
        best = torch.topk(expected[place], 2)
        assert new.logprobs[0] == pytest.approx(expected[place, new.ids[0]].item(), abs=1e-4)
        assert list(new.top_ids[0]) == best.indices.tolist()
        assert list(new.top_logprobs[0]) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_options_are_weighed_by_one_look(folder: Path, engine: GeneratorEngine) -> None:
    model = save_writer(folder)
    ids = tokens(30)

    (found,) = run(engine, begin(1, ids, tokens_max=1, weighed=(5, 9, 7)))[1]

    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([ids])).logits[0, -1], -1)[[5, 9, 7]]
    assert list(found.logprobs) == pytest.approx(expected.tolist(), abs=1e-4)
    assert (found.ids, found.finish) == ((), "stop")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_seed_gives_the_same_text_whatever_runs_beside_it(folder: Path, dtype: str) -> None:
    """Bit by bit: in other company a row may not be rounded otherwise."""
    alone = loaded(folder, dtype=dtype)
    drawn = Sampling(temperature=1.0, top_p=0.95, seed=7, logit_bias=((2, -100.0),))
    prompts = [tokens(length, seed=length) for length in (3, 70, 130, 64, 9, 200)]
    expected = [ids_of(run(alone, begin(1, ids, sampling=drawn, tokens_max=40))[1]) for ids in prompts]

    crowd = loaded(folder, dtype=dtype, places=5)
    found = run(crowd, *(begin(number, ids, sampling=drawn, tokens_max=40) for number, ids in enumerate(prompts, 1)))

    assert [ids_of(found[number]) for number in range(1, len(prompts) + 1)] == expected


def test_without_a_seed_texts_differ(engine: GeneratorEngine) -> None:
    drawn = Sampling(temperature=1.5)
    found = run(engine, *(begin(number, tokens(10), sampling=drawn) for number in range(1, 5)))

    assert len({tuple(ids_of(one)) for one in found.values()}) > 1


def test_what_prompts_share_is_computed_once_and_changes_nothing(folder: Path, engine: GeneratorEngine) -> None:
    first, other = tokens(150), [*tokens(150)[:130], *tokens(20, seed=5)]
    expected = [ids_of(run(loaded(folder), begin(1, ids))[1]) for ids in (first, other)]

    found = [run(engine, begin(number, ids))[number] for number, ids in enumerate((first, other, first), 1)]

    assert [ids_of(one) for one in found] == [*expected, expected[0]]
    assert [one[0].cached for one in found] == [0, 2 * CHUNK_TOKENS, 2 * CHUNK_TOKENS]
    both = run(engine, begin(11, first), begin(12, first), begin(13, other))
    assert [ids_of(both[number]) for number in (11, 12, 13)] == [expected[0], expected[0], expected[1]]


def test_a_text_ends_by_its_own_token_by_others_and_at_its_limit(engine: GeneratorEngine) -> None:
    ids = tokens(10)
    whole = ids_of(run(engine, begin(1, ids))[1])

    (ended,) = run(engine, begin(2, ids, sampling=Sampling(temperature=0.0, logit_bias=((2, 100.0),))))[2]
    stopped = run(engine, begin(3, ids, stop_ids=(whole[4],)))[3]
    limited = run(engine, begin(4, ids, tokens_max=3))[4]

    assert (ended.ids, ended.finish) == ((2,), "stop")
    assert ids_of(stopped) == whole[: whole.index(whole[4]) + 1]
    assert stopped[-1].finish == "stop"
    assert (ids_of(limited), limited[-1].finish) == (whole[:3], "length")


def test_a_long_prompt_stops_no_running_text(engine: GeneratorEngine) -> None:
    engine.begin(begin(1, tokens(5), tokens_max=200))
    engine.step()
    engine.begin(begin(2, tokens(400)))
    steps = [engine.step() for _ in range(400 // CHUNK_TOKENS)]

    assert all([new.sequence for new in step.grown] == [1] for step in steps), "a token a step for the first"
    assert {new.sequence for new in engine.step().grown} == {1, 2}


def test_an_aborted_text_frees_its_place_at_once(folder: Path) -> None:
    engine = loaded(folder, places=1)
    engine.begin(begin(1, tokens(5), tokens_max=400))
    engine.step()
    engine.begin(begin(2, tokens(5)))
    engine.begin(begin(3, tokens(5)))
    assert engine.step().waiting == 2

    engine.abort([1, 3, 99])

    assert [new.sequence for new in engine.step().grown] == [2]
    while not engine.is_idle:
        assert {new.sequence for new in engine.step().grown} <= {2}


def test_an_abort_while_a_prompt_is_read(folder: Path) -> None:
    engine = loaded(folder, places=2)
    engine.begin(begin(1, tokens(5), tokens_max=100))
    engine.step()
    engine.begin(begin(2, tokens(400)))
    engine.step()

    engine.abort([2, 1])

    assert engine.is_idle
    assert ids_of(run(engine, begin(3, tokens(400)))[3]) == ids_of(run(loaded(folder), begin(3, tokens(400)))[3])


@pytest.mark.parametrize(
    "fields",
    [
        {"ids": []},
        {"ids": [10_000]},
        {"ids": [-1]},
        {"ids": [5] * 512},
        {"ids": [5], "weighed": (10_000,)},
        {"ids": [5], "adapter": "polite"},
        {"ids": [5], "sampling": Sampling(logit_bias=((10_000, 1.0),))},
    ],
)
def test_what_cannot_be_written_is_a_fault_of_its_own(engine: GeneratorEngine, fields: dict[str, Any]) -> None:
    found = run(engine, begin(1, **fields), begin(2, tokens(5)))

    assert found[1][-1].finish == "fault"
    assert found[1][-1].fault
    assert found[2][-1].finish == "length"


def test_a_grammar_that_cannot_be_followed_is_the_requests_own_fault(engine: GeneratorEngine) -> None:
    crowd = " | ".join(f'/[a-z]*{number}[a-z]*/ "{number}"' for number in range(2000))
    later = json.dumps({"grammars": [{"lark_grammar": f"%llguidance {{}}\nstart: /[a-c]{{6}}/ ({crowd})"}]})

    found = run(engine, begin(1, [5], grammar="start: nothing"), begin(2, [5], grammar=later), begin(3, tokens(5)))

    assert [grown.finish for grown in found[1]] == ["refused"]
    assert [grown.finish for grown in found[2]][-1] == "refused"
    assert len(ids_of(found[2])) >= 3, "it is too complex after these"
    assert "form" in found[2][-1].fault
    assert found[3][-1].finish == "length"


def test_numbers_that_are_not_finite_fail_their_own_text(folder: Path, tmp_path: Path) -> None:
    model = save_writer(tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight[7] = float("nan")
    model.save_pretrained(tmp_path)
    engine = loaded(tmp_path)

    without = Sampling(temperature=0.0, logit_bias=((2, -100.0), (7, -100.0)))
    other = begin(2, [5, 6], sampling=without)

    found = run(engine, begin(1, [7, 5]), other)

    assert "not finite" in found[1][-1].fault
    assert ids_of(found[2]) == ids_of(run(loaded(folder), other)[2])


def test_a_grammar_is_followed_to_its_end(engine: GeneratorEngine) -> None:
    from llguidance import LLMatcher  # noqa: PLC0415  # used here only

    grammar = LLMatcher.grammar_from_regex("(ab|cd)[0-9]{3}")
    found = run(engine, *(begin(n, tokens(5), grammar=grammar, sampling=Sampling(seed=n)) for n in range(1, 5)))

    texts = [vocabulary().decode([token for token in ids_of(one) if token != 2]) for one in found.values()]
    assert all(len(text) == 5 and text[:2] in ("ab", "cd") and text[2:].isdigit() for text in texts)
    assert {one[-1].finish for one in found.values()} == {"stop"}


def test_a_model_of_another_family_is_refused(tmp_path: Path, folder: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text().replace('"model_type": "llama"', '"model_type": "gpt2"')
    (tmp_path / "config.json").write_text(config)

    with pytest.raises(ValueError, match="gpt2"):
        loaded(tmp_path)
    assert tuple(DECODERS) == CAUSAL
