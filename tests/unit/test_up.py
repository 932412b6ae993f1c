"""What `appliance up` settles before it starts anything."""

import asyncio
import signal
from pathlib import Path

import httpx
import pytest
from prometheus_client import REGISTRY

from appliance import tally
from appliance.cli.startup import stop_signals
from appliance.cli.up import _emptied, _unready, check_port
from appliance.errors import StartupError
from appliance.queue.server import free_port
from tests.gateway_parts import MODELS, Gateway
from tests.http_parts import serving


@pytest.mark.parametrize("host", ["no.such.host.invalid", "ä..b", "127.0.0.1:80"])
def test_a_host_that_is_none_is_named(host: str) -> None:
    with pytest.raises(StartupError, match=r"gateway\.host is"):
        check_port(host, 8080)


def test_a_free_port_is_free() -> None:
    check_port("127.0.0.1", free_port())


def test_figures_of_earlier_processes_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    (folder / "counter_1.db").touch()

    assert list(_emptied(folder).iterdir()) == []


def test_a_file_in_the_place_of_the_figures_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics").touch()
    with pytest.raises(StartupError, match="metrics cannot be emptied"):
        _emptied(tmp_path / "metrics")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_each_way_to_end_a_program_stops_it_in_order(number: signal.Signals) -> None:
    before = signal.signal(number, signal.SIG_DFL)
    try:
        stop = stop_signals()
        signal.raise_signal(number)
        await asyncio.wait_for(stop.wait(), 5)
    finally:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, before)


async def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        stop_signals()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


async def test_waiting_for_readiness_is_in_no_figure_of_requests() -> None:
    def counted() -> float:
        tally.flush()
        labels = {"endpoint": "readyz", "status": "503"}
        return REGISTRY.get_sample_value("appliance_requests_total", labels) or 0.0

    gateway = Gateway()
    before = counted()
    async with serving(gateway.app) as port:
        missing = await _unready("127.0.0.1", port)
        assert missing is not None
        assert '"org/writer":"starting"' in missing
        assert counted() == before
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://127.0.0.1:{port}/readyz")).status_code == 503
        assert counted() == before + 1
        for facts in MODELS:
            gateway.canary.prove(facts.name)
        assert await _unready("127.0.0.1", port) is None
