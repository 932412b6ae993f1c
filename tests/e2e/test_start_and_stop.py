"""Starting and stopping: every process is accounted for, whatever ends the appliance."""

import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from appliance.workers.engines.fake import FakeModel
from tests.appliance_process import ApplianceProcess, wait_gone
from tests.e2e.conftest import ALIAS
from tests.fake_model import fake_config

pytestmark = pytest.mark.slow

PARTS = ("nats-server", "appliance gateway", "appliance worker", "appliance.workers.host")
GONE_S = 10.0


def start(folder: Path, knobs: FakeModel | None = None, **environ: str) -> ApplianceProcess:
    """With the fake engine, which is up at once: what is tested here is the processes."""
    config = fake_config(folder / "model", knobs, alias=ALIAS)
    return ApplianceProcess(folder, environ=environ, config=config)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_every_process(tmp_path: Path, number: signal.Signals) -> None:
    with start(tmp_path) as appliance:
        appliance.wait_for_line("ready:")
        family = appliance.family()
        for part in PARTS:
            appliance.child(part)

        assert appliance.stop(number) == 0

        assert wait_gone(family, within_s=GONE_S) == []
        assert "stopped" in appliance.output


def test_a_killed_supervisor_takes_every_process_with_it(tmp_path: Path) -> None:
    with start(tmp_path) as appliance:
        appliance.wait_for_line("ready:")
        family = appliance.family()
        assert len(family) >= 1 + len(PARTS)

        appliance.process.kill()

        assert wait_gone(family, within_s=GONE_S) == []


def test_it_starts_again_in_the_same_folder(tmp_path: Path) -> None:
    for _ in range(2):
        with start(tmp_path) as appliance:
            appliance.wait_for_line("ready:")
            assert appliance.stop() == 0


def test_a_stop_while_starting_leaves_nothing(tmp_path: Path) -> None:
    with start(tmp_path) as appliance:
        appliance.wait_for_line("base URL")
        family = appliance.family()

        assert appliance.stop() == 0

        assert wait_gone(family, within_s=GONE_S) == []


@pytest.mark.parametrize("part", PARTS)
def test_each_part_is_started_again_when_it_is_killed(tmp_path: Path, part: str) -> None:
    with start(tmp_path) as appliance, OpenAI(base_url=appliance.base_url, api_key="any") as client:
        appliance.wait_for_line("ready:")
        victim = appliance.child(part)

        victim.kill()

        appliance.wait_until(
            lambda: any(p.pid != victim.pid for p in _processes(appliance, part)), within_s=20, what=f"a new {part}"
        )
        appliance.wait_ready()
        assert len(client.embeddings.create(model=ALIAS, input="after the crash").data[0].embedding) > 0


def test_requests_in_flight_are_answered_before_it_stops(tmp_path: Path) -> None:
    with start(tmp_path, FakeModel(batch_s=1.0), APPLIANCE_GATEWAY_CANARY_INTERVAL_S="3600") as appliance:
        appliance.wait_for_line("ready:")
        lengths: list[int] = []
        asking = threading.Thread(target=_ask, args=(appliance, lengths.append))
        asking.start()
        appliance.wait_until(lambda: _pending(appliance) > 0, within_s=10, what="a request in flight")

        assert appliance.stop() == 0

        asking.join(30)
        assert lengths == [3]


def test_a_port_in_use_stops_the_start_and_says_so(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with start(tmp_path, APPLIANCE_PORT=str(holder.getsockname()[1])) as appliance:
            assert appliance.process.wait(20) == 78
            appliance.wait_ended()
            assert "APPLIANCE_PORT" in appliance.output
            assert "in use" in appliance.output


def test_two_appliances_do_not_share_a_folder(tmp_path: Path) -> None:
    with start(tmp_path) as first:
        first.wait_for_line("base URL")
        with start(tmp_path) as second:
            assert second.process.wait(20) == 78
            second.wait_ended()
            assert "another appliance runs" in second.output


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"APPLIANCE_PORT": "99999"}, ("gateway.port", "99999", "65535")),
        ({"APPLIANCE_HOST": "0.0.0.0"}, ("gateway.host", "APPLIANCE_API_KEY")),
        ({"APPLIANCE_MODELS": "no/such-model", "HF_HUB_OFFLINE": "1"}, ("no/such-model",)),
    ],
)
def test_a_bad_setting_stops_the_start_and_names_it(
    tmp_path: Path, environ: dict[str, str], words: tuple[str, ...]
) -> None:
    with ApplianceProcess(tmp_path, environ=environ) as appliance:
        assert appliance.process.wait(40) == 78
        appliance.wait_ended()
        for word in words:
            assert word in appliance.output
        assert "Traceback" not in appliance.output


def _processes(appliance: ApplianceProcess, word: str) -> list[psutil.Process]:
    return [process for process in appliance.family() if word in " ".join(_words(process))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _ask(appliance: ApplianceProcess, report: Callable[[int], None]) -> None:
    with OpenAI(base_url=appliance.base_url, api_key="any", max_retries=0, timeout=30) as client:
        report(len(client.embeddings.create(model=ALIAS, input=["one", "two", "three"]).data))


def _pending(appliance: ApplianceProcess) -> float:
    return appliance.metric("appliance_pending_requests")
