"""Readiness: a canary of the model's own kind really came back, lately."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import get_args

import pytest
from prometheus_client import REGISTRY

from appliance.errors import DeadlinePassed, EngineFailed
from appliance.gateway import health
from appliance.gateway.dispatch import Dispatcher
from appliance.gateway.health import CANARIES, Canary
from appliance.gateway.pending_calls import Result
from appliance.jobs import Done, Job, Usage
from appliance.presets import TaskName
from tests.node_parts import until

MODELS = {"m": ("rerank", "classify"), "n": ("embed",)}


class Answering(Dispatcher):
    """Answers every canary, or fails it as told."""

    def __init__(self) -> None:
        super().__init__(pending_requests_max=1, pending_bytes_max=1)
        self.asked: list[Job] = []
        self.faults: dict[str, Exception] = {}
        self.on_run: Callable[[], None] = lambda: None

    @property
    def reply_to(self) -> str:
        return "replies.here"

    async def run(self, jobs: Sequence[Job], *, gone: object = None) -> list[Result]:
        self.asked += jobs
        await asyncio.sleep(0)
        self.on_run()
        if fault := self.faults.get(jobs[0].model):
            raise fault
        return [Result((), Done(Usage(1)))]


def test_there_is_a_canary_for_every_task_a_preset_may_name() -> None:
    assert set(CANARIES) == set(get_args(TaskName))


async def test_each_model_gets_a_canary_of_its_first_task() -> None:
    dispatcher = Answering()
    canary = Canary(dispatcher, MODELS, interval_s=60)
    assert canary.faults() == {"m": "starting", "n": "starting"}

    watching = asyncio.create_task(canary.run())
    await until(lambda: len(dispatcher.asked) == len(MODELS))
    await until(lambda: not canary.faults())
    watching.cancel()

    assert {job.model: job.task for job in dispatcher.asked} == {"m": CANARIES["rerank"], "n": CANARIES["embed"]}


@pytest.mark.parametrize(
    ("fault", "word"), [(DeadlinePassed("late"), "starting"), (EngineFailed("x"), "engine_failed")]
)
async def test_a_model_that_does_not_answer_says_why(fault: Exception, word: str) -> None:
    dispatcher = Answering()
    dispatcher.faults["m"] = fault
    canary = Canary(dispatcher, MODELS, interval_s=60)
    watching = asyncio.create_task(canary.run())
    await until(lambda: list(canary.faults()) == ["m"])
    watching.cancel()

    assert canary.faults() == {"m": word}


async def test_real_traffic_is_proof_until_it_is_old() -> None:
    canary = Canary(Answering(), MODELS, interval_s=60)
    canary.prove("m")
    canary.prove("n")
    assert canary.faults() == {}

    stale = Canary(Answering(), MODELS, interval_s=-100)  # a window in the past: whatever was proved is too old
    stale.prove("m")
    assert stale.faults() == {"m": "stale", "n": "starting"}


async def test_answers_to_other_gateways_are_proof_once_this_one_has_had_its_own() -> None:
    canary = Canary(Answering(), {"m": ("generate",)}, interval_s=60)
    canary.hear("m")
    assert canary.faults() == {"m": "starting"}

    canary.prove("m")
    canary._proved_s["m"] -= 1000
    assert canary.faults() == {"m": "stale"}
    canary.hear("m")
    assert canary.faults() == {}


class Clock:
    """Stands for the module `time`, and stands still unless it is set; `reads` tells that somebody looked."""

    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.reads = 0

    def monotonic(self) -> float:
        self.reads += 1
        return self.now_s


async def test_no_canary_is_sent_while_there_is_traffic(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(health, "time", clock)
    dispatcher = Answering()
    canary = Canary(dispatcher, {"m": ("generate",)}, interval_s=0.001)
    watching = asyncio.create_task(canary.run())
    await until(lambda: not canary.faults())

    for _ in range(5):
        clock.now_s += 0.0009
        canary.prove("m")
        clock.reads = 0
        await until(lambda: clock.reads > 2)
    assert len(dispatcher.asked) == 1, "the first"

    clock.now_s += 0.001
    await until(lambda: len(dispatcher.asked) == 2)
    watching.cancel()


async def test_a_canary_that_waited_behind_work_says_nothing_against_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    dispatcher = Answering()
    canary = Canary(dispatcher, {"m": ("generate",)}, interval_s=0)
    watching = asyncio.create_task(canary.run())
    await until(lambda: not canary.faults())

    dispatcher.faults["m"] = DeadlinePassed("late")
    dispatcher.on_run = lambda: canary.prove("m")  # a text was answered meanwhile
    failed = len(dispatcher.asked)
    await until(lambda: len(dispatcher.asked) > failed + 3)
    dispatcher.on_run = lambda: None
    assert not caplog.records
    await until(lambda: bool(caplog.records))
    watching.cancel()

    assert [record.getMessage() for record in caplog.records] == ["canary for m: no answer within 10 s"], "and once"


async def test_readiness_is_a_figure_and_its_return_a_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ready() -> float | None:
        return REGISTRY.get_sample_value("appliance_ready", {"model": "told"})

    caplog.set_level(logging.INFO, "appliance.gateway.health")
    monkeypatch.setattr(health, "TELL_S", 0.0)
    dispatcher = Answering()
    dispatcher.faults["told"] = EngineFailed("the engine died")
    canary = Canary(dispatcher, {"told": ("generate",)}, interval_s=0)
    watching = asyncio.create_task(canary.run())
    await until(lambda: ready() == 0)

    del dispatcher.faults["told"]
    await until(lambda: ready() == 1)
    watching.cancel()

    assert caplog.messages == ["told answers"]
