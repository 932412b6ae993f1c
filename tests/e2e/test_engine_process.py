"""Real engine processes with the fake engine: order, faults, deaths, and that nothing is ever left behind."""

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import uvloop

from appliance.errors import EngineFailed, StartupError
from appliance.workers import wire
from appliance.workers.engine_process import (
    EngineDied,
    EngineOutOfMemory,
    EngineProcess,
    EngineRefused,
    host_command,
)
from appliance.workers.engines.fake import FakeEngine
from appliance.workers.wire import Begin, Encode, Load, Step
from appliance.workers.writing.engine import TextEngineProcess

pytestmark = pytest.mark.slow

DEADLINE_S = 20.0
CRASH, FAULT, NAN = 900, 901, 902
MODEL = {"width": 4, "crash_token": CRASH, "crash_status": 9, "fault_token": FAULT, "nan_token": NAN}


def model_folder(path: Path, **changes: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "fake.json").write_text(json.dumps({**MODEL, **changes}))
    return path


def load_of(folder: Path, model: str = "m") -> Load:
    return Load(model, str(folder), "float32", "cpu", 1)


def packed(*texts: list[int]) -> tuple[bytes, list[int]]:
    ids = np.concatenate([np.array(text, dtype="<i4") for text in texts])
    return ids.tobytes(), [len(text) for text in texts]


def engine_of(
    tmp_path: Path,
    *,
    command: list[str] | None = None,
    start_timeout_s: float = DEADLINE_S,
    batch_timeout_s: float = DEADLINE_S,
    stop_timeout_s: float = DEADLINE_S,
) -> EngineProcess:
    return EngineProcess(
        command or host_command("fake", threads=1),
        name="fake-0",
        sockets_dir=tmp_path / "s",
        start_timeout_s=start_timeout_s,
        batch_timeout_s=batch_timeout_s,
        stop_timeout_s=stop_timeout_s,
    )


async def until(fact: Callable[[], bool], what: str) -> None:
    """Wait for a fact about the outside world, which sends no event."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not fact():
        assert time.monotonic() < deadline_s, f"still not: {what}"
        await asyncio.sleep(0.01)


def is_gone(pid: int) -> bool:
    """No process, or one that only waits to be reaped."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


async def test_it_loads_encodes_and_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = model_folder(tmp_path / "model")
    async with engine_of(tmp_path) as engine:
        assert list((tmp_path / "s").iterdir()) == []  # the socket's name is gone once it is dialled
        loaded = await engine.load(load_of(folder))
        encoded = await engine.encode("m", *packed([1, 2], [3], [1, 2]))
        pid = engine.pid

    assert (loaded.model, loaded.width) == ("m", 4)
    rows = np.frombuffer(encoded.rows, dtype="<f4").reshape(3, 4)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1.0, rtol=1e-6)
    np.testing.assert_array_equal(rows[0], rows[2])
    assert not np.array_equal(rows[0], rows[1])
    assert is_gone(pid)
    assert (await engine.died()).message.endswith("exited with status 0")
    assert "has ended" in caplog.text
    assert "died" not in caplog.text


async def test_the_process_answers_as_the_engine_in_this_process_does(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", width=64)
    ids, lengths = packed([5, 6, 7], [8])
    local = FakeEngine()
    local.load(load_of(folder))

    async with engine_of(tmp_path) as engine:
        await engine.load(load_of(folder))
        remote = await engine.encode("m", ids, lengths)

    assert remote.rows == local.encode(Encode(1, "m", ids, tuple(lengths))).rows


async def test_outstanding_batches_are_answered_in_order_each_with_its_own_rows(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", batch_s=0.005)
    finished: list[int] = []
    async with engine_of(tmp_path) as engine:
        await engine.load(load_of(folder))
        alone = [await engine.encode("m", *packed([number])) for number in range(16)]

        async def encode(number: int) -> bytes:
            encoded = await engine.encode("m", *packed([number]))
            finished.append(number)
            return encoded.rows

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(encode(number)) for number in range(16)]
            await asyncio.sleep(0)
            assert engine.outstanding == 16

    assert finished == list(range(16))
    assert [task.result() for task in tasks] == [encoded.rows for encoded in alone]


async def test_batches_larger_than_the_sockets_buffer_pass_both_ways(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", width=256, tokens_max=1_000_000, crash_token=None, fault_token=None)
    many = packed(*[[number] for number in range(4000)])
    long = packed(list(range(900_000)))
    async with engine_of(tmp_path) as engine:
        await engine.load(load_of(folder))
        rows, row = await asyncio.gather(engine.encode("m", *many), engine.encode("m", *long))

    assert (len(rows.rows), len(row.rows)) == (4000 * 256 * 4, 256 * 4)


async def test_each_fault_has_its_own_error_and_the_engine_lives_on(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", tokens_before_oom=4, tokens_max=8, crash_token=None)
    async with engine_of(tmp_path) as engine:
        with pytest.raises(EngineRefused, match="'m' is not loaded"):
            await engine.encode("m", *packed([1]))
        await engine.load(load_of(folder))
        outcomes = await asyncio.gather(
            engine.encode("m", *packed([1, 2], [3, 4])),
            engine.encode("m", *packed([1, 2], [3, 4, 5])),
            engine.encode("m", *packed([FAULT])),
            engine.encode("m", *packed([1] * 9)),
            engine.encode("m", *packed([1], [NAN], [2])),
            return_exceptions=True,
        )
        good, oom, fault, too_long, nan = outcomes
        assert isinstance(good, wire.Encoded)
        assert isinstance(oom, EngineOutOfMemory)
        assert oom.message == "5 tokens do not fit; 4 do"
        assert type(fault) is EngineFailed
        assert fault.message == "RuntimeError: token 901 was met"
        assert isinstance(too_long, EngineRefused)
        assert isinstance(nan, wire.Encoded)
        assert nan.bad == (1,)
        assert np.isfinite(np.frombuffer(nan.rows, dtype="<f4")).all()
        await engine.encode("m", *packed([1]))


async def test_a_bug_in_following_an_engine_ends_it(tmp_path: Path) -> None:
    """Otherwise nobody would read on, and nobody start it again."""
    (tmp_path / "fake.json").write_text("{}")
    engine = TextEngineProcess(
        host_command("fake-texts", threads=1), name="x", sockets_dir=tmp_path, start_timeout_s=30, batch_timeout_s=30
    )

    async def fails(step: Step) -> None:
        raise KeyError(step.running)

    async with engine:
        engine.listen(fails)
        await engine.load(
            Load("m", str(tmp_path), "float32", "cpu", 1, task="generate", sequences_max=1, tokens_max=64)
        )
        engine.begin(Begin(1, "m", np.array([5, 6], dtype="<i4").tobytes(), 8))
        async with asyncio.timeout(10):
            death = await engine.died()

    assert "the node could not follow it" in death.message


@pytest.mark.parametrize("name", ["fake", "fake-texts"])
async def test_an_engine_without_adapters_says_so_and_lives_on(tmp_path: Path, name: str) -> None:
    engine = TextEngineProcess(
        host_command(name, threads=1), name=name, sockets_dir=tmp_path, start_timeout_s=30, batch_timeout_s=30
    )
    async with engine:
        for changing in (engine.load_adapter("a", tmp_path), engine.unload_adapter("a")):
            with pytest.raises(EngineRefused, match="takes no adapters"):
                await changing
        assert engine.outstanding == 0


async def test_a_model_that_cannot_be_served_is_refused_without_naming_paths(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "fake.json").write_text('{"width": "wide"}')
    async with engine_of(tmp_path) as engine:
        with pytest.raises(EngineRefused, match=r"fake\.json cannot be read") as caught:
            await engine.load(load_of(folder))
        await engine.load(load_of(model_folder(tmp_path / "other")))

    assert str(tmp_path) not in caught.value.message


async def test_a_crash_fails_everything_outstanding_and_says_how(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    async with engine_of(tmp_path) as engine:
        await engine.load(load_of(folder))
        first, crashed, second, third = await asyncio.gather(
            engine.encode("m", *packed([1])),
            engine.encode("m", *packed([CRASH])),
            engine.encode("m", *packed([2])),
            engine.encode("m", *packed([3])),
            return_exceptions=True,
        )
        assert isinstance(first, wire.Encoded)
        for lost in (crashed, second, third):
            assert isinstance(lost, EngineDied)
            assert "exited with status 9" in lost.message
            assert lost.was_begun == (lost is crashed)
        assert crashed is not second
        assert engine.outstanding == 0
        with pytest.raises(EngineDied) as late:
            await engine.encode("m", *packed([1]))
        assert not late.value.was_begun
        assert (await engine.died()).message == "the engine fake-0 died: it exited with status 9"


async def test_an_engines_lines_have_their_own_levels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    folder = model_folder(tmp_path / "model", fault_token=9)
    async with engine_of(tmp_path) as engine:
        await engine.load(load_of(folder))
        with pytest.raises(EngineFailed):
            await engine.encode("m", *packed([9]))

    lines = [(record.levelname, record.getMessage()) for record in caplog.records if "engine" in record.getMessage()]
    (failed,) = [index for index, line in enumerate(lines) if line[1].endswith(": the engine failed")]
    assert lines[failed][0] == "ERROR"
    assert lines[failed + 1][0] == "ERROR", "its traceback"
    assert "Traceback" in lines[failed + 1][1]
    assert not any(level in line[1] for line in lines for level in ("INFO", "ERROR"))


async def test_a_bug_that_ends_an_engine_is_told_as_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = "from appliance.workers import host; host.ENGINES['fake'] = lambda: 1 / 0; host.main()"
    with pytest.raises(EngineDied, match="exited with status 1"):
        async with engine_of(tmp_path, command=[sys.executable, "-c", script, "--engine", "fake"]) as engine:
            raise await engine.died()

    assert {record.levelname for record in caplog.records} == {"CRITICAL"}
    assert "engine fake-0: an uncaught exception" in caplog.messages
    assert "engine fake-0: ZeroDivisionError: division by zero" in caplog.messages


async def test_a_kill_from_outside_is_seen_even_when_nothing_is_outstanding(tmp_path: Path) -> None:
    async with engine_of(tmp_path) as engine:
        os.kill(engine.pid, signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            death = await engine.died()

    assert death.message == "the engine fake-0 died: killed by SIGKILL"


def test_a_connection_that_uvloop_has_closed_is_a_death_like_any_other(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")

    async def lose() -> None:
        async with engine_of(tmp_path) as engine:
            await engine.load(load_of(folder))
            assert engine._writer is not None
            engine._writer.transport.abort()
            await asyncio.sleep(0)  # it is closed, and the reader has not seen it
            with pytest.raises(EngineDied):
                await engine.encode("m", *packed([1]))

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(lose(), DEADLINE_S))


async def test_an_engine_that_does_not_answer_is_killed(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", token_s=60.0)
    async with engine_of(tmp_path, batch_timeout_s=0.2) as engine:
        await engine.load(load_of(folder))
        outcomes = await asyncio.gather(
            engine.encode("m", *packed([1])), engine.encode("m", *packed([2])), return_exceptions=True
        )
        pid = engine.pid

    for lost in outcomes:
        assert isinstance(lost, EngineDied)
        assert "did not answer within 0.2 s" in lost.message
    assert is_gone(pid)


async def test_the_time_of_a_batch_starts_when_its_turn_comes(tmp_path: Path) -> None:
    # Eight batches take 1.6 s together, each well under the timeout.
    folder = model_folder(tmp_path / "model", batch_s=0.2)
    async with engine_of(tmp_path, batch_timeout_s=1.2) as engine:
        await engine.load(load_of(folder))
        encoded = await asyncio.gather(*(engine.encode("m", *packed([number])) for number in range(8)))

    assert len(encoded) == 8


async def test_a_cancelled_call_leaves_the_order_intact(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", batch_s=0.05)
    async with engine_of(tmp_path) as engine:
        await engine.load(load_of(folder))
        expected = await engine.encode("m", *packed([3]))
        tasks = [asyncio.create_task(engine.encode("m", *packed([number]))) for number in (1, 2, 3)]
        await asyncio.sleep(0)
        tasks[0].cancel()
        tasks[1].cancel()

        assert (await tasks[2]).rows == expected.rows
        outcomes = await asyncio.gather(*tasks[:2], return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [asyncio.CancelledError] * 2


async def test_stopping_lets_the_engine_finish_what_it_has(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", batch_s=0.05)
    async with engine_of(tmp_path) as engine:
        await engine.load(load_of(folder))
        tasks = [asyncio.create_task(engine.encode("m", *packed([number]))) for number in range(3)]
        await asyncio.sleep(0)

    assert [task.result().bad for task in tasks] == [(), (), ()]


async def test_an_engine_that_does_not_stop_is_ended(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", batch_s=60.0)
    async with engine_of(tmp_path, stop_timeout_s=0.1) as engine:
        await engine.load(load_of(folder))
        task = asyncio.create_task(engine.encode("m", *packed([1])))
        await asyncio.sleep(0)
        pid = engine.pid

    assert is_gone(pid)
    with pytest.raises(EngineDied, match="killed by SIGTERM"):
        await task


async def test_an_engine_that_ignores_sigterm_is_ended_too(tmp_path: Path) -> None:
    async with engine_of(tmp_path, command=dialler(DEAF), stop_timeout_s=0.2) as engine:
        await until(lambda: any("deaf" in line for line in engine.stderr_tail), "deaf")
        pid = engine.pid

    assert is_gone(pid)
    assert "killed by SIGKILL" in (await engine.died()).message


async def test_cancelling_the_owner_ends_the_process(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", batch_s=60.0)
    started = asyncio.Event()
    pids: list[int] = []

    async def own() -> None:
        async with engine_of(tmp_path, stop_timeout_s=0.1) as engine:
            await engine.load(load_of(folder))
            pids.append(engine.pid)
            started.set()
            await engine.encode("m", *packed([1]))

    owner = asyncio.create_task(own())
    await started.wait()
    owner.cancel()
    with pytest.raises(asyncio.CancelledError):
        await owner

    assert is_gone(pids[0])


async def test_cancelling_a_start_leaves_nothing_behind(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, command=[sys.executable, "-c", "import time; time.sleep(60)"])
    entering = asyncio.create_task(engine.__aenter__())
    await until(lambda: engine.is_started, "the process is started")
    pid = engine.pid
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering

    assert is_gone(pid)
    assert list((tmp_path / "s").iterdir()) == []


async def test_an_engine_that_never_dials_is_ended(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, command=[sys.executable, "-c", "import time; time.sleep(60)"], start_timeout_s=0.2)
    with pytest.raises(EngineDied, match=r"did not dial within 0\.2 s"):
        await engine.__aenter__()

    assert is_gone(engine.pid)
    assert list((tmp_path / "s").iterdir()) == []


async def test_an_engine_that_fails_to_start_says_why(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, command=[sys.executable, "-c", "raise SystemExit('no such device')"])
    with pytest.raises(EngineDied, match="exited with status 1") as caught:
        await engine.__aenter__()

    assert caught.value.stderr_tail == ("no such device",)


async def test_a_command_that_does_not_exist_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot be started: No such file"):
        await engine_of(tmp_path, command=[str(tmp_path / "nothing")]).__aenter__()


async def test_a_socket_path_over_the_systems_limit_is_named(tmp_path: Path) -> None:
    engine = EngineProcess(
        host_command("fake", threads=1),
        name="far",
        sockets_dir=tmp_path / ("d" * 100),
        start_timeout_s=1.0,
        batch_timeout_s=1.0,
    )
    with pytest.raises(StartupError, match="set `state_dir` to a shorter path"):
        await engine.__aenter__()


async def test_only_the_process_that_was_started_may_dial(tmp_path: Path) -> None:
    # A child of the command dials first and is hung up on; then the command itself dials and is served.
    async with engine_of(tmp_path, command=dialler(STRANGER_FIRST)) as engine:
        await until(lambda: "stranger: refused" in engine.stderr_tail, "the stranger is refused")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        ("b'\\xff\\xff\\xff\\xff'", "announces 4294967295 B"),
        ("(3).to_bytes(4, 'big') + b'\\xc1\\xc1\\xc1'", "broke the protocol"),
        ("wire.frame(wire.Encoded(1, b'', 1, (), 0.0))", "Encoded answers nothing that was asked next"),
        ("wire.frame(wire.Fault(5, 'oom', ''))", "Fault answers nothing that was asked next"),
    ],
    ids=["too long", "garbage", "wrong kind", "wrong batch"],
)
async def test_an_engine_that_breaks_the_protocol_is_ended(tmp_path: Path, answer: str, reason: str) -> None:
    folder = model_folder(tmp_path / "model")
    async with engine_of(tmp_path, command=dialler(f"link.recv(1); link.sendall({answer}); time.sleep(60)")) as engine:
        with pytest.raises(EngineDied, match=reason):
            await engine.load(load_of(folder))

        assert is_gone(engine.pid)


async def test_an_engine_that_hangs_up_but_runs_on_is_ended(tmp_path: Path) -> None:
    async with engine_of(tmp_path, command=dialler("link.close(); time.sleep(60)")) as engine:
        async with asyncio.timeout(DEADLINE_S):
            death = await engine.died()

    assert "closed its connection and ran on" in death.message


async def test_our_settings_and_secrets_do_not_reach_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APPLIANCE_API_KEY", "secret")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    script = "print(sorted(n for n in os.environ if n.startswith(('APPLIANCE', 'CUDA'))), flush=True); link.recv(1)"
    async with engine_of(tmp_path, command=dialler(script)) as engine:
        await until(lambda: "['CUDA_VISIBLE_DEVICES']" in engine.stderr_tail, "the environment is printed")


async def test_an_interrupt_from_the_terminal_is_left_to_the_node(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    async with engine_of(tmp_path) as engine:
        await engine.load(load_of(folder))
        os.kill(engine.pid, signal.SIGINT)
        await engine.encode("m", *packed([1]))


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's; elsewhere an idle engine sees EOF")
async def test_the_death_of_the_node_ends_an_engine_in_the_middle_of_a_batch(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", batch_s=120.0)
    node = await asyncio.create_subprocess_exec(
        sys.executable, "-c", NODE, str(tmp_path / "s"), str(folder), stdout=asyncio.subprocess.PIPE
    )
    assert node.stdout is not None
    async with asyncio.timeout(DEADLINE_S):
        pid = int(await node.stdout.readline())
    assert not is_gone(pid)

    node.kill()
    await node.wait()

    await until(lambda: is_gone(pid), "the engine is gone with its node")


@pytest.mark.parametrize(
    ("frame", "status"),
    [
        (wire.frame(wire.Stop()), 0),
        (b"", 0),
        (b"\x00\x00", 0),
        (b"\x00\x00\x00\x09abc", 0),
        (b"\xff\xff\xff\xff", 2),
        (b"\x00\x00\x00\x01\xc1", 2),
    ],
    ids=["stop", "hung up", "half a header", "half a body", "too long", "garbage"],
)
def test_the_exit_status_of_an_engine(tmp_path: Path, frame: bytes, status: int) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(tmp_path / "x.sock"))
        listener.listen(1)
        listener.settimeout(DEADLINE_S)
        command = [*host_command("fake", threads=1), "--socket", str(tmp_path / "x.sock")]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(frame)
                connection.shutdown(socket.SHUT_WR)
                _, errors = process.communicate(timeout=DEADLINE_S)

    assert process.returncode == status
    assert (b"malformed frame" in errors) == (status == 2)


def test_an_engine_without_a_node_ends_itself(tmp_path: Path) -> None:
    command = [*host_command("fake", threads=1), "--socket", str(tmp_path / "nobody.sock")]

    assert subprocess.run(command, timeout=DEADLINE_S, check=False, capture_output=True).returncode == 0


def dialler(script: str) -> list[str]:
    """A command that dials the node as `link` and then runs `script`."""
    dial = (
        "import os, signal, socket, sys, time\n"
        "from appliance.workers import wire\n"
        "path = sys.argv[sys.argv.index('--socket') + 1]\n"
        "link = socket.socket(socket.AF_UNIX)\n"
    )
    connects = "" if "connect" in script else "link.connect(path)\n"
    return [sys.executable, "-c", dial + connects + script]


DEAF = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("deaf", flush=True)
while True:
    time.sleep(60)
"""
STRANGER_FIRST = """
child = os.fork()
if child == 0:
    link = socket.socket(socket.AF_UNIX)
    link.connect(path)
    print("stranger:", "refused" if link.recv(1) == b"" else "served", flush=True)
    os._exit(0)
os.waitpid(child, 0)
link.connect(path)
link.recv(1)
"""
NODE = """
import asyncio, sys
from pathlib import Path
from appliance.workers.engine_process import EngineProcess, host_command
from appliance.workers.wire import Load

async def main():
    engine = EngineProcess(
        host_command("fake", threads=1),
        name="orphan", sockets_dir=Path(sys.argv[1]), start_timeout_s=20, batch_timeout_s=200,
    )
    async with engine:
        await engine.load(Load("m", sys.argv[2], "float32", "cpu", 1))
        task = asyncio.create_task(engine.encode("m", bytes(4), [1]))
        await asyncio.sleep(0)
        print(engine.pid, flush=True)
        await task

asyncio.run(main())
"""
