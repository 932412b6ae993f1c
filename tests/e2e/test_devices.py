"""Several engine processes on one machine share one local queue."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from openai import OpenAI

from appliance.workers.engines.fake import FakeModel
from tests.appliance_process import ApplianceProcess
from tests.e2e.conftest import ALIAS
from tests.fake_model import fake_config

pytestmark = pytest.mark.slow

ENGINES = 3
REQUESTS = 90
TUNING = "tuning = { batch_items_max = 4 }\n"


def test_every_engine_takes_its_share_and_a_dead_one_is_made_up_for(tmp_path: Path) -> None:
    config = fake_config(tmp_path / "model", FakeModel(batch_s=0.05), alias=ALIAS) + TUNING
    environ = {"APPLIANCE_WORKER_ENGINES": str(ENGINES)}
    with (
        ApplianceProcess(tmp_path, config=config, environ=environ) as appliance,
        OpenAI(base_url=appliance.base_url, api_key="any", max_retries=0, timeout=60) as client,
    ):
        appliance.wait_for_line("ready:")

        def ask(number: int) -> list[float]:
            return client.embeddings.create(model=ALIAS, input=f"text {number}").data[0].embedding

        with ThreadPoolExecutor(16) as pool:
            before = list(pool.map(ask, range(REQUESTS)))
            busy_s = [busy(appliance, number) for number in range(ENGINES)]
            answers = pool.map(ask, range(REQUESTS))
            appliance.child("appliance.workers.host").kill()
            after = list(answers)

        assert min(busy_s) >= 0.2 * sum(busy_s), f"the engines were busy for {busy_s} s"
        assert after == before


def busy(appliance: ApplianceProcess, number: int) -> float:
    """Seconds that one engine computed."""
    return appliance.metric(f'appliance_device_seconds_total{{device="cpu/{number}"')
