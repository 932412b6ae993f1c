"""A supervised process: started again when it dies, and gone for good when it is stopped."""

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from appliance.cli import children
from appliance.cli.children import Child, Part, environment
from appliance.cli.startup import EXIT_CONFIG
from appliance.errors import StartupError
from appliance.telemetry import MULTIPROCESS_VARIABLE
from tests.node_parts import until


def child_of(
    tmp_path: Path,
    script: str,
    *,
    stop_s: float = 5.0,
    is_proved: bool = False,
    prepare: Callable[[], None] | None = None,
) -> Child:
    environ = environment({"WHERE": str(tmp_path), MULTIPROCESS_VARIABLE: str(tmp_path / "metrics")})
    part = Part("sample", ("/bin/sh", "-c", script), environ, stop_s, prepare)
    proved = asyncio.Event()
    if is_proved:
        proved.set()
    return Child(part, metrics_dir=tmp_path / "metrics", proved=proved)


def lines_of(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "RESTART_DELAY_S_MIN", 0.0)


async def test_a_part_that_dies_is_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    child = child_of(tmp_path, 'echo run >> "$WHERE/runs"; [ $(wc -l < "$WHERE/runs") -ge 3 ] && exec sleep 60; exit 7')
    task = asyncio.create_task(child.run())

    await until(lambda: len(lines_of(tmp_path / "runs")) == 3)
    await child.stop()
    await asyncio.wait_for(task, 5)

    assert [record.levelno for record in caplog.records] == [logging.ERROR] * 2
    assert "the sample ended (exit code 7)" in caplog.text


async def test_a_part_that_is_misconfigured_is_not_started_again(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="the sample cannot run as configured"):
        await child_of(tmp_path, f"exit {EXIT_CONFIG}").run()


async def test_what_stops_a_part_that_has_run_as_configured_may_pass(tmp_path: Path) -> None:
    script = f'echo run >> "$WHERE/runs"; [ $(wc -l < "$WHERE/runs") -ge 3 ] && exec sleep 60; exit {EXIT_CONFIG}'
    child = child_of(tmp_path, script, is_proved=True)
    task = asyncio.create_task(child.run())

    await until(lambda: len(lines_of(tmp_path / "runs")) == 3)
    await child.stop()

    await asyncio.wait_for(task, 5)


async def test_what_a_part_needs_on_disk_is_there_at_each_start(tmp_path: Path) -> None:
    prepared: list[int] = []

    def prepare() -> None:
        prepared.append(1)
        if len(prepared) == 2:
            raise StartupError("no room")

    script = 'rmdir "$PROMETHEUS_MULTIPROC_DIR" && echo run >> "$WHERE/runs"; exit 1'
    child = child_of(tmp_path, script, is_proved=True, prepare=prepare)
    task = asyncio.create_task(child.run())

    await until(lambda: len(lines_of(tmp_path / "runs")) >= 2)
    await child.stop()

    await asyncio.wait_for(task, 5)
    assert len(prepared) >= 3


async def test_a_part_runs_without_shared_figures_where_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=children.METRICS_BYTES_MIN - 1))
    child = child_of(tmp_path, 'echo "${PROMETHEUS_MULTIPROC_DIR-none}" >> "$WHERE/runs"; exec sleep 60')
    task = asyncio.create_task(child.run())

    await until(lambda: len(lines_of(tmp_path / "runs")) == 1)
    await child.stop()

    await asyncio.wait_for(task, 5)
    assert lines_of(tmp_path / "runs") == ["none"]


async def test_a_part_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    part = Part("sample", (str(tmp_path / "nothing"),), {}, 1.0)
    child = Child(part, metrics_dir=tmp_path, proved=asyncio.Event())

    with pytest.raises(StartupError, match="the sample cannot be started"):
        await child.run()


async def test_a_part_that_ignores_the_request_to_stop_is_killed(tmp_path: Path) -> None:
    child = child_of(tmp_path, "trap '' TERM; echo run >> \"$WHERE/runs\"; exec sleep 60", stop_s=0.05)
    task = asyncio.create_task(child.run())

    await until(lambda: len(lines_of(tmp_path / "runs")) == 1)
    await child.stop()

    await asyncio.wait_for(task, 5)


async def test_a_stop_while_the_part_is_being_started_is_heeded(tmp_path: Path) -> None:
    child = child_of(tmp_path, "exec sleep 60")
    task = asyncio.create_task(child.run())
    await asyncio.wait({task}, timeout=0)  # it is being started, and there is no process yet

    await child.stop()

    await asyncio.wait_for(task, 5)


async def test_a_stop_between_two_lives_is_heeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "RESTART_DELAY_S_MIN", 1000.0)
    monkeypatch.setattr(children, "RESTART_DELAY_S_MAX", 1000.0)
    child = child_of(tmp_path, 'echo run >> "$WHERE/runs"; kill -9 $$')
    task = asyncio.create_task(child.run())
    await until(lambda: len(lines_of(tmp_path / "runs")) == 1)

    await child.stop()

    await asyncio.wait_for(task, 5)
    assert lines_of(tmp_path / "runs") == ["run"]


async def test_a_kill_is_at_once(tmp_path: Path) -> None:
    child = child_of(tmp_path, "trap '' TERM; echo run >> \"$WHERE/runs\"; exec sleep 60", stop_s=1000.0)
    task = asyncio.create_task(child.run())
    await until(lambda: len(lines_of(tmp_path / "runs")) == 1)

    child.kill()

    await asyncio.wait_for(task, 5)
