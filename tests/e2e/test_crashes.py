"""Crashes while a request is on its way: the request is answered all the same, and correctly."""

import threading
from pathlib import Path

import openai
import pytest
from openai import OpenAI

from appliance.workers.engines.fake import FakeModel
from tests.appliance_process import ApplianceProcess
from tests.e2e.conftest import ALIAS
from tests.fake_model import fake_config

pytestmark = pytest.mark.slow

# A node that is gone is noticed after the ack wait: short, so that the tests are.
QUEUE = "[queue]\nack_wait_s = 1.0\n"
CANARIES = 5  # more than may be among the texts that are counted
TEXTS = [f"text {index} " + "and more words " * 20 for index in range(160)]


class Asking:
    """One request on a thread."""

    def __init__(self, appliance: ApplianceProcess, texts: list[str]) -> None:
        self.vectors: list[list[float]] = []
        self.fault: BaseException | None = None
        self._appliance = appliance
        self._texts = texts
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def answer(self, *, within_s: float = 60) -> list[list[float]]:
        self._thread.join(within_s)
        assert not self._thread.is_alive(), f"no answer in {within_s} s:\n{self._appliance.output}"
        assert self.fault is None, f"{self.fault!r}\n{self._appliance.output}"
        return self.vectors

    def _ask(self) -> None:
        try:
            with OpenAI(base_url=self._appliance.base_url, api_key="any", max_retries=0, timeout=55) as client:
                data = client.embeddings.create(model=ALIAS, input=self._texts).data
                self.vectors = [row.embedding for row in data]
        except BaseException as error:  # the test's own thread reports it
            self.fault = error


def wait_for_a_batch(appliance: ApplianceProcess, *, after: float) -> None:
    """Until many more texts than `after` went to an engine: the request is half-way."""
    appliance.wait_until(lambda: texts_begun(appliance) > after + CANARIES, within_s=30, what="a batch")


def texts_begun(appliance: ApplianceProcess) -> float:
    return appliance.metric("appliance_batch_items_sum")


@pytest.mark.parametrize("part", ["appliance worker", "nats-server", "appliance.workers.host"])
def test_a_killed_part_does_not_cost_the_request(tmp_path: Path, part: str) -> None:
    config = QUEUE + fake_config(tmp_path / "model", FakeModel(batch_s=0.5), alias=ALIAS)
    with ApplianceProcess(tmp_path, config=config) as appliance:
        appliance.wait_for_line("ready:")
        begun = texts_begun(appliance)
        asking = Asking(appliance, TEXTS)
        wait_for_a_batch(appliance, after=begun)

        appliance.child(part).kill()

        rows = asking.answer()
        if part == "appliance worker":
            assert appliance.metric("appliance_redelivered_jobs_total") >= 1
        assert rows == Asking(appliance, TEXTS).answer()


def test_an_input_that_kills_the_engine_fails_alone(tmp_path: Path) -> None:
    crash_token = 9999  # of the packaged vocabulary
    knobs = FakeModel(crash_token=crash_token, batch_s=0.1)
    config = QUEUE + fake_config(tmp_path / "model", knobs, alias=ALIAS)
    poison = word_of(tmp_path / "model", crash_token)
    with (
        ApplianceProcess(tmp_path, config=config) as appliance,
        OpenAI(base_url=appliance.base_url, api_key="any", max_retries=0, timeout=55) as client,
    ):
        appliance.wait_for_line("ready:")
        neighbours = [Asking(appliance, [f"neighbour {number}"]) for number in range(4)]

        with pytest.raises(openai.InternalServerError) as caught:
            client.embeddings.create(model=ALIAS, input=["fine", poison])

        assert caught.value.code == "engine_failed"
        assert caught.value.param == "input[1]"
        for neighbour in neighbours:
            assert len(neighbour.answer()) == 1
        appliance.wait_ready()


def word_of(folder: Path, token: int) -> str:
    """A text whose tokens contain `token`."""
    return (folder / "vocab.txt").read_text().splitlines()[token]
