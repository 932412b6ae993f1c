"""A writing node over a real engine process that only echoes: settling, leaving, dying, and what is heard of it."""

import asyncio
import json
import re
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY

from appliance import tally
from appliance.errors import ApplianceError, DeadlinePassed, EngineFailed, InvalidRequest, TooLong
from appliance.jobs import (
    Beat,
    Decide,
    Delta,
    Detokenize,
    Done,
    Embed,
    Failed,
    Generate,
    Question,
    Task,
    Text,
    Tokenize,
    Tokenized,
    Weights,
)
from appliance.queue.memory import MemoryBroker
from appliance.settings import QueueSettings
from appliance.workers.writing import node
from appliance.workers.writing.node import WrittenModel
from tests.node_parts import until
from tests.tiny_writers import save_writer, vocabulary
from tests.writing_appliance import Asker, asking, writing_appliance, writing_node, written

pytestmark = pytest.mark.slow

LETTERS = "KLMNPQRSUV"  # each a token of its own
CRASH = vocabulary().encode("X").ids[0]
FAULT = vocabulary().encode("Y").ids[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_writer(tmp_path / "model")
    return tmp_path / "model"


def text_of(prompt: str, **fields: Any) -> Generate:
    return Generate(prompt=prompt, **fields)


def model_of(folder: Path, *, places: int) -> WrittenModel:
    return written("m", folder, generation={"sequences_max": places, "sequence_tokens_max": 512})


def appliance(folder: Path, *, places: int = 4, **fake: Any) -> AbstractAsyncContextManager[Asker]:
    (folder / "fake.json").write_text(json.dumps(fake))
    return writing_appliance(model_of(folder, places=places), sockets_dir=folder.parent / "s", engine="fake-texts")


async def test_a_text_is_answered_whole_or_as_it_comes(folder: Path) -> None:
    async with appliance(folder) as asker:
        whole, done = await asker.text("m", text_of("KLM"))
        streamed = [event async for event in asker.events(await asker.send("m", text_of("KLM", is_streamed=True)))]

    assert whole == "MLK"
    assert (done.finish, done.usage.input_tokens, done.usage.output_tokens) == ("stop", 3, 4)
    assert done.tokens_max == 512
    deltas = [event for event in streamed if isinstance(event, Delta)]
    assert "".join(delta.text for delta in deltas) == "MLK"
    assert len(deltas) == 3
    assert streamed[-1] == done


async def test_a_stop_string_ends_a_text_before_it_and_is_told(folder: Path) -> None:
    async with appliance(folder, has_end=False) as asker:
        found, done = await asker.text("m", text_of("KLMN", stop=("LK",), tokens_max=400))

    assert (found, done.finish, done.stop) == ("NM", "stop", "LK")
    assert done.usage.output_tokens == 4


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        (text_of("a" * 600), TooLong),
        (text_of("a", form="regex", pattern=b"["), InvalidRequest),
        (text_of("aY", is_streamed=True), EngineFailed),
        (Embed(inputs=("a",)), InvalidRequest),
    ],
)
async def test_a_job_that_cannot_be_written_fails_with_its_error(
    folder: Path, task: Task, kind: type[ApplianceError]
) -> None:
    async with appliance(folder, fault_token=FAULT) as asker:
        with pytest.raises(kind):
            await asker.ask("m", task)


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"form": "regex", "pattern": b"[A-Z]*"}, "response_format.pattern"),
        ({"form": "json_object"}, "response_format"),
    ],
)
async def test_a_form_that_cannot_be_followed_any_further_is_the_clients(
    folder: Path, form: dict[str, Any], param: str
) -> None:
    async with appliance(folder, refused_token=FAULT) as asker:
        with pytest.raises(InvalidRequest, match="nothing may follow") as caught:
            await asker.ask("m", text_of("aY", is_streamed=True, **form))
    assert caught.value.param == param


async def test_a_fault_of_one_text_is_no_others(folder: Path) -> None:
    async with appliance(folder, fault_token=FAULT) as asker:
        faulty, fine = await asyncio.gather(
            asker.ask("m", text_of("aY")), asker.text("m", text_of("LMN")), return_exceptions=True
        )

    assert isinstance(faulty, EngineFailed)
    assert not isinstance(fine, BaseException)
    assert fine[0] == "NML"


async def test_more_texts_than_places_wait_their_turn(folder: Path) -> None:
    async with appliance(folder, places=2) as asker:
        found = await asyncio.gather(*(asker.text("m", text_of(LETTERS[number : number + 2])) for number in range(9)))

    assert [one[0] for one in found] == [LETTERS[number : number + 2][::-1] for number in range(9)]


def figure(name: str, **labels: str) -> float:
    tally.flush()
    return sum(
        sample.value
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == name and sample.labels.items() >= {"model": "m", **labels}.items()
    )


def ended(outcome: str) -> float:
    return figure("appliance_jobs_total", outcome=outcome)


async def test_texts_are_counted_while_they_are_written(folder: Path) -> None:
    written, first = figure("appliance_written_tokens_total"), figure("appliance_node_first_token_seconds_count")
    async with appliance(folder, places=1, has_end=False, step_s=0.01) as asker:
        texts = [await asker.send("m", text_of("KL", tokens_max=500)) for _ in range(3)]
        await until(lambda: figure("appliance_texts", state="waiting") == 2)
        await until(lambda: figure("appliance_written_tokens_total") > written + 5)
        assert figure("appliance_texts", state="running") == figure("appliance_text_places") == 1
        assert figure("appliance_node_first_token_seconds_count") == first + 1
        for job_id in texts:
            await asker.cancel(job_id)
        await until(lambda: figure("appliance_texts") == 0)


async def test_a_client_that_leaves_frees_its_place(folder: Path) -> None:
    cancelled, done = ended("cancelled"), ended("done")
    async with appliance(folder, places=1, has_end=False, step_s=0.05) as asker:
        endless = await asker.send("m", text_of("KL", is_streamed=True, tokens_max=500))
        assert isinstance(await anext(asker.events(endless)), Delta | Beat)
        await asker.cancel(endless)
        found, _ = await asker.text("m", text_of("MN", tokens_max=2))

    assert found == "NM"
    assert (ended("cancelled") - cancelled, ended("done") - done) == (1, 1)
    assert asker.unheard(endless) <= 2, "within two tokens"


async def test_a_job_that_is_cancelled_while_it_waits_is_dropped(folder: Path) -> None:
    async with appliance(folder, places=1, has_end=False, step_s=0.01) as asker:
        endless = await asker.send("m", text_of("KL", is_streamed=True, tokens_max=500))
        await anext(asker.events(endless))
        waiting = [await asker.send("m", text_of("MN")) for _ in range(4)]
        for job_id in [*waiting, endless]:
            await asker.cancel(job_id)
        found, _ = await asker.text("m", text_of("PQ", tokens_max=2))

    assert found == "QP"
    assert all(asker.unheard(job_id) == 0 for job_id in waiting)


async def test_a_deadline_ends_a_text(folder: Path) -> None:
    late = ended(DeadlinePassed.code)
    async with appliance(folder, has_end=False, step_s=0.02) as asker:
        job_id = await asker.send("m", text_of("KL", is_streamed=True, tokens_max=500), deadline_s=1.0)
        events = [event async for event in asker.events(job_id)]

    assert isinstance(events[-1], Failed)
    assert isinstance(events[-1].error(), DeadlinePassed)
    assert ended(DeadlinePassed.code) - late == 1


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_a_text_that_has_nothing_to_say_beats(folder: Path, is_streamed: bool) -> None:
    async with appliance(folder, has_end=False, step_s=1.6) as asker:
        job_id = await asker.send("m", text_of("KL", is_streamed=is_streamed, tokens_max=3))
        events = [event async for event in asker.events(job_id)]

    assert any(isinstance(event, Beat) for event in events)
    assert isinstance(events[-1], Done)
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "LKL"


async def test_an_engine_that_dies_is_started_again_and_texts_not_begun_are_written(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failed = ended(EngineFailed.code)
    async with appliance(folder, step_s=0.05) as asker:
        jobs = [asyncio.create_task(asker.text("m", text_of("KLMNPQRS"))) for _ in range(6)]
        stream = await asker.send("m", text_of("KLMNPQRS", is_streamed=True))
        events = asker.events(stream)
        await anext(events)

        asker.kill_engine()

        found = await asyncio.gather(*jobs)
        rest = [event async for event in events]

    assert [one[0] for one in found] == ["SRQPNMLK"] * 6
    assert isinstance(rest[-1], Failed), "what a client has seen a part of is not written anew"
    assert isinstance(rest[-1].error(), EngineFailed)
    assert ended(EngineFailed.code) - failed == 1
    begun_anew, death = [record for record in caplog.records if "engine" in record.getMessage()]
    assert begun_anew.levelname == "WARNING"
    assert re.fullmatch(r"the engine of m had \d jobs in hand: \d are begun anew, 1 fail", begun_anew.getMessage())
    assert death.levelname == "ERROR"
    assert death.getMessage() == "the engine writer died: killed by SIGKILL; it is started again in 0.1 s"


async def test_a_text_that_kills_its_engine_fails_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with appliance(folder, crash_token=CRASH, step_s=0.01) as asker:
        deadly = asyncio.create_task(asker.ask("m", text_of("aaX")))
        others = [asyncio.create_task(asker.text("m", text_of("KLMNPQRSUV"))) for _ in range(3)]

        with pytest.raises(EngineFailed):
            await deadly
        found = await asyncio.gather(*others)

    assert [one[0] for one in found] == ["VUSRQPNMLK"] * 3
    blamed = [record.getMessage() for record in caplog.records if "fails: 2 engines died" in record.getMessage()]
    assert blamed == ["job job-0 of m fails: 2 engines died while they wrote it"]


async def test_a_text_whose_gateway_is_out_of_reach_is_left_to_others(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "BEAT_S", 0.02)
    unanswered = ended("unanswered")
    broker = MemoryBroker(QueueSettings())
    (folder / "fake.json").write_text('{"has_end": false, "step_s": 0.05}')
    async with (
        asking(broker) as asker,
        writing_node(asker, broker, model_of(folder, places=1), sockets_dir=folder.parent / "s", engine="fake-texts"),
    ):
        endless = await asker.send("m", text_of("KL", tokens_max=500))
        assert isinstance(await anext(asker.events(endless)), Beat)
        broker.stop()
        await until(lambda: ended("unanswered") > unanswered)
        broker.start()
        found, _ = await asker.text("m", text_of("MN", tokens_max=2))

    assert found == "NM"
    (record,) = [record for record in caplog.records if "were not sent" in record.getMessage()]
    assert "replies to 1 jobs of m were not sent" in record.getMessage()


async def test_a_node_that_stops_ends_what_is_begun_and_leaves_the_rest_to_others(folder: Path) -> None:
    broker = MemoryBroker(QueueSettings())
    (folder / "fake.json").write_text('{"has_end": false, "step_s": 0.02}')
    model = model_of(folder, places=1)
    sockets = folder.parent / "s"
    async with asking(broker) as asker:
        async with writing_node(asker, broker, model, sockets_dir=sockets, engine="fake-texts"):
            endless = await asker.send("m", text_of("KL", is_streamed=True, tokens_max=500))
            events = asker.events(endless)
            await anext(events)
            waiting = await asker.send("m", text_of("MN", tokens_max=2))
        rest = [event async for event in events]
        async with writing_node(asker, broker, model, sockets_dir=sockets, engine="fake-texts"):
            found = [event async for event in asker.events(waiting)]

    assert isinstance(rest[-1], Failed)
    assert "".join(event.text for event in found if isinstance(event, Delta)) == "NM"


async def test_decisions_are_told_of_every_question(folder: Path) -> None:
    messages = b'[{"role": "user", "content": "hello"}]'
    questions = (
        Question("predicate", "It is a greeting"),
        Question("choice", "Which?", ("a", "b", "c")),
        Question("score", "How?", ("low", "high")),
    )
    async with appliance(folder) as asker:
        (weights,), done = await asker.ask("m", Decide(messages, questions))

    assert isinstance(weights, Weights)
    assert [len(row) // 4 for row in weights.questions] == [1, 3, 2]
    assert done.usage.output_tokens == 3


async def test_tokens_are_told_without_an_engine(folder: Path) -> None:
    async with appliance(folder) as asker:
        (tokenized,), _ = await asker.ask("m", Tokenize("KL"))
        assert isinstance(tokenized, Tokenized)
        (back,), _ = await asker.ask("m", Detokenize(tokenized.ids))

    assert back == Text("KL")
