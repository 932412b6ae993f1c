"""SGLang's environment: what is to be run for it, and what is made of what went wrong."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from appliance.cli import checks
from appliance.cli.engines import engines_group, kind_for
from appliance.errors import StartupError
from appliance.hardware import Gpu, GpuQuery
from appliance.workers.engines.sglang import install
from appliance.workers.engines.sglang.environment import (
    KINDS,
    Environment,
    Installed,
    Kind,
    has_adapter_client,
    lock_file,
    lock_sha256,
)

STEP = install.Step("installing", ("pip",))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment.of(str(tmp_path))


def complete(environment: Environment, kind: Kind = "cpu", *, digest: str | None = None) -> Installed:
    installed = Installed(kind, "0.5.23", digest or lock_sha256(kind))
    environment.folder.mkdir(parents=True)
    environment.marker.write_bytes(msgspec.json.encode(installed))
    return installed


@pytest.mark.parametrize("kind", KINDS)
def test_every_package_is_pinned_once(kind: Kind) -> None:
    lines = [line for line in lock_file(kind).read_text().splitlines() if not line.startswith("#")]
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]

    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines), lines
    assert len(set(names)) == len(names)
    assert {"sglang", "torch", "llguidance", "transformers"} <= set(names)
    assert "sglang==0.5.23" in lines


def test_the_plan_is_an_environment_then_torch_then_the_lock(environment: Environment) -> None:
    steps = install.plan("cpu", environment, python="/usr/bin/python3")

    assert steps[0].command == ("/usr/bin/python3", "-m", "venv", "--clear", str(environment.folder))
    assert steps[1].command[-1] == "torch==2.13.0"
    assert "--no-deps" not in steps[1].command
    assert steps[2].command[-3:] == ("--no-deps", "--requirement", str(lock_file("cpu")))
    assert {step.command[0] for step in steps[1:]} == {str(environment.python)}


def test_what_is_complete_is_kept(environment: Environment) -> None:
    installed, said = complete(environment), list[str]()

    assert install.install("cpu", environment, say=said.append) == installed
    assert "is installed" in said[0]


def test_the_states_of_an_environment(environment: Environment) -> None:
    assert environment.state() == "absent"
    environment.folder.mkdir(parents=True)
    assert environment.state() == "partial"
    environment.marker.write_text("{broken")
    assert environment.state() == "partial"
    environment.folder.joinpath(environment.marker).write_bytes(
        msgspec.json.encode(Installed("cpu", "0.5.23", "another"))
    )
    assert environment.state() == "outdated"


def test_a_failed_step_leaves_no_complete_environment(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(environment, digest="old")
    broken = install.Step("breaking", (sys.executable, "-c", "print('No matching distribution found'); exit(1)"))
    monkeypatch.setattr(install, "plan", lambda *_, **__: [broken])

    with pytest.raises(StartupError, match="package index"):
        install.install("cpu", environment, say=lambda _: None)

    assert environment.state() == "partial"


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("OSError: [Errno 28] No space left on device", "disk is full"),
        ("NewConnectionError('<pip._vendor…>: Temporary failure in name resolution')", "check the network"),
        ("ERROR: No matching distribution found for sglang==0.5.23", "check the network"),
        ("error: something else", "status 3"),
    ],
)
def test_a_failure_says_what_to_do(output: str, words: str) -> None:
    error = install.failure(STEP, output, 3)

    assert words in error.message
    assert output in error.message


def test_a_command_that_is_not_there(environment: Environment) -> None:
    with pytest.raises(StartupError, match="cannot be run"):
        install._run(install.Step("making", (str(environment.folder / "none"),)))


def test_too_little_disk_is_said_first(environment: Environment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(install.DISK_BYTES, "cpu", 2**60)

    with pytest.raises(StartupError, match="state_dir"):
        install.install("cpu", environment, say=lambda _: None)

    assert environment.state() == "absent"


def test_one_at_a_time(environment: Environment) -> None:
    complete(environment)
    with install._alone(environment), pytest.raises(StartupError, match="another process"):
        install.remove(environment)

    assert install.remove(environment)
    assert not install.remove(environment)


def test_what_is_in_use_is_not_removed(environment: Environment) -> None:
    complete(environment)
    environment.python.parent.mkdir()
    environment.python.symlink_to(sys.executable)
    process = subprocess.Popen([environment.python, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        with pytest.raises(StartupError, match=f"pid {process.pid}"):
            install.remove(environment)
    finally:
        process.communicate()

    assert install.remove(environment)


def test_the_kind_follows_the_machine() -> None:
    assert kind_for(GpuQuery()) == "cpu"
    assert kind_for(GpuQuery((Gpu("NVIDIA L4", 23034, "580.1"),))) == "cuda"
    with pytest.raises(StartupError, match="--kind"):
        kind_for(GpuQuery(problem="no answer"))


def test_the_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("APPLIANCE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("APPLIANCE_STATE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    complete(Environment.of(str(tmp_path)))
    run = CliRunner()

    listed = run.invoke(engines_group, ["list"])
    kept = run.invoke(engines_group, ["install", "sglang", "--kind", "cpu"])
    removed = run.invoke(engines_group, ["remove", "sglang"])
    again = run.invoke(engines_group, ["remove", "sglang"])
    unknown = run.invoke(engines_group, ["install", "vllm"])

    assert listed.output.startswith("sglang  ready  0.5.23 for cpu")
    assert "is installed" in kept.output
    assert "is removed" in removed.output
    assert "is not installed" in again.output
    assert (unknown.exit_code, "sglang" in unknown.output) == (2, True)
    assert has_adapter_client()


@pytest.mark.parametrize(
    ("state", "kind", "is_gpu", "has_client", "status", "words"),
    [
        ("absent", None, True, True, "ok", "not installed"),
        ("partial", None, False, True, "warn", "cut short"),
        ("outdated", "cpu", False, True, "warn", "another release"),
        ("ready", "cpu", True, True, "warn", "not what"),
        ("ready", "cuda", False, True, "warn", "not what"),
        ("ready", "cpu", False, False, "warn", "aiohttp"),
        ("ready", "cuda", True, True, "ok", "0.5.23 for cuda"),
    ],
)
def test_what_the_doctor_says(  # noqa: PLR0917 - a table
    state: str, kind: Kind | None, is_gpu: bool, has_client: bool, status: str, words: str
) -> None:
    installed = Installed(kind, "0.5.23", "x") if kind else None

    finding = checks.check_sglang(state, installed, is_gpu=is_gpu, has_client=has_client)  # type: ignore[arg-type]

    assert (finding.status, words in finding.detail) == (status, True), finding
