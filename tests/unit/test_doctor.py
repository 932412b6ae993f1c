"""The doctor: what it concludes, and that a broken machine or configuration is a finding and never a crash."""

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from appliance.cli import checks, doctor
from appliance.cli.checks import Finding, PortState, TorchBuild, parse_torch_version
from appliance.cli.config import config_group
from appliance.cli.doctor import doctor_command, examine, nats_addresses, port_state, render
from appliance.hardware import Gpu, GpuQuery

L4 = GpuQuery((Gpu("NVIDIA L4", 23034, "570.10"),))
GIB = 2**30


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("APPLIANCE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on loopback that somebody, this process, listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def tiny_model(folder: Path) -> Path:
    folder.mkdir()
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    (folder / "config.json").write_text("{}")
    return folder


def found(findings: list[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


@pytest.mark.parametrize(
    ("finding", "status", "part"),
    [
        (checks.check_python((3, 10)), "fail", "3.10"),
        (checks.check_python((3, 11)), "ok", "3.11"),
        (checks.check_port(PortState("h", 1)), "ok", "h:1"),
        (checks.check_port(PortState("h", 1, "Address already in use", "nginx (pid 2)")), "fail", "nginx (pid 2)"),
        (checks.check_port(PortState("h", 1, "in use", "python -m appliance up (pid 2)")), "warn", "pid 2"),
        (checks.check_disk("d", free_bytes=GIB, wanted_bytes=GIB, is_writable=True), "ok", "1.0 GiB"),
        (checks.check_disk("d", free_bytes=GIB, wanted_bytes=GIB + 1, is_writable=True), "warn", "queue"),
        (checks.check_disk("d", free_bytes=GIB // 2 - 1, wanted_bytes=0, is_writable=True), "fail", "0.5 GiB"),
        (checks.check_disk("d", free_bytes=GIB, wanted_bytes=0, is_writable=False), "fail", "not writable"),
        (checks.check_memory(available_bytes=4 * GIB, weights_bytes=GIB, queue_bytes=GIB), "ok", "4.0 GiB"),
        (checks.check_memory(available_bytes=4 * GIB - 1, weights_bytes=GIB, queue_bytes=GIB), "warn", "4.0 GiB"),
        (checks.check_memory(available_bytes=GIB, weights_bytes=GIB, queue_bytes=0), "fail", "1.0 GiB"),
        (checks.check_gpu_memory(memory_bytes=10 * GIB, weights_bytes=8 * GIB), "ok", "10.0 GiB"),
        (checks.check_gpu_memory(memory_bytes=10 * GIB, weights_bytes=8 * GIB + 1), "fail", "8.0 GiB"),
        (checks.check_cores(1, gateway_processes=1), "warn", "1 usable"),
        (checks.check_cores(2, gateway_processes=3), "warn", "3 gateway processes"),
        (checks.check_cores(2, gateway_processes=2), "ok", "2 usable"),
        (checks.check_torch(None), "fail", "not installed"),
        (checks.check_torch(TorchBuild("2.13.0+cpu", "")), "ok", "CPU build"),
        (checks.check_torch(TorchBuild("2.13.0", "13.0")), "ok", "CUDA 13.0"),
        (checks.check_gpu(GpuQuery(), device="auto", build=None), "ok", "none"),
        (checks.check_gpu(GpuQuery(problem="no"), device="auto", build=None), "fail", "no"),
        (checks.check_gpu(GpuQuery(problem="no"), device="cpu", build=None), "warn", "no"),
        (checks.check_gpu(L4, device="cpu", build=None), "warn", "not used"),
        (checks.check_gpu(L4, device="auto", build=None), "ok", "1 x NVIDIA L4"),
        (checks.check_gpu(L4, device="auto", build=TorchBuild("2.13.0+cpu", "")), "fail", "CPU build"),
        (checks.check_gpu(L4, device="auto", build=TorchBuild("2.13.0", "13.0")), "fail", "too old"),
        (checks.check_gpu(L4, device="auto", build=TorchBuild("2.13.0", "12.8")), "ok", "CUDA 12.8"),
        (checks.check_nats_server(None), "fail", "nats-server"),
        (checks.check_nats_server("/bin/nats-server"), "ok", "/bin/nats-server"),
        (checks.check_nats_urls([("a:1", ""), ("b:1", "")]), "ok", "a:1, b:1"),
        (checks.check_nats_urls([("a:1", ""), ("b:1", "refused")]), "warn", "b:1: refused"),
        (checks.check_nats_urls([("a:1", "refused")]), "fail", "a:1: refused"),
    ],
)
def test_conclusions(finding: Finding, status: str, part: str) -> None:
    assert finding.status == status
    assert part in finding.detail
    assert bool(finding.action) is (status != "ok")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n", TorchBuild("2.13.0+cpu", "")),
        ("__version__ = '2.13.0'\ncuda: Optional[str] = '13.0'\n", TorchBuild("2.13.0", "13.0")),
        ("__version__ = \"2\"\ncuda = '12.8'\n", TorchBuild("2", "12.8")),
        ("", None),
    ],
)
def test_torch_is_read_without_importing_it(text: str, expected: TorchBuild | None) -> None:
    assert parse_torch_version(text) == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("nats://h", ["h:4222"]),
        ("tls://u:p@h:5/, nats://i", ["h:5", "i:4222"]),
        ("nats://[::1]:5,nats://[::1]", ["[::1]:5", "[::1]:4222"]),
        ("h:5", ["h:5"]),
        (",", []),
    ],
)
def test_nats_addresses_lose_credentials(url: str, expected: list[str]) -> None:
    assert nats_addresses(url) == expected


def test_a_free_port_is_free_and_a_held_one_names_its_holder(listener: int) -> None:
    assert port_state("127.0.0.1", free_port()).problem == ""

    held = port_state("127.0.0.1", listener)

    assert "in use" in held.problem
    assert f"pid {os.getpid()}" in held.holder


def test_a_host_that_is_not_of_this_machine_is_a_finding() -> None:
    assert checks.check_port(port_state("192.0.2.1", 8080)).status == "fail"


def test_a_broken_configuration_is_a_finding_and_the_rest_is_still_checked() -> None:
    Path("appliance.toml").write_text("[gateway]\nport = 'x'")

    findings = list(examine(config_file=None, environ={}, role="gateway"))

    assert found(findings, "settings").status == "fail"
    assert "gateway.port" in found(findings, "settings").detail
    assert {"python", "port", "disk", "cores", "nats"} <= {finding.name for finding in findings}


def test_unknown_variables_are_warnings() -> None:
    findings = list(examine(config_file=None, environ={"APPLIANCE_PROT": "1"}, role="gateway"))

    assert [finding.status for finding in findings if finding.name == "settings"] == ["ok", "warn"]


def test_a_gateway_alone_needs_a_nats_that_answers(listener: int) -> None:
    absent = list(examine(config_file=None, environ={}, role="gateway"))
    present = list(
        examine(config_file=None, environ={"APPLIANCE_NATS_URL": f"nats://u:p@127.0.0.1:{listener}"}, role="gateway")
    )
    refused = list(
        examine(config_file=None, environ={"APPLIANCE_NATS_URL": f"nats://127.0.0.1:{free_port()}"}, role="gateway")
    )

    assert [found(findings, "nats").status for findings in (absent, present, refused)] == ["fail", "ok", "fail"]
    assert "u:p" not in found(present, "nats").detail


@pytest.mark.parametrize("url", ["nats://h:notaport", "nats://", "nats://h:99999"])
def test_an_impossible_nats_url_is_a_finding(url: str) -> None:
    findings = list(examine(config_file=None, environ={"APPLIANCE_NATS_URL": url}, role="gateway"))

    assert found(findings, "nats").status == "fail"


def worker_findings(text: str, **environ: str) -> list[Finding]:
    Path("appliance.toml").write_text(text)
    return list(examine(config_file=None, environ={"APPLIANCE_WORKER_DEVICE": "cpu", **environ}, role="worker"))


def test_a_models_files_are_located_and_verified(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")

    good = worker_findings(f"[[models]]\nname = 'm'\nfolder = '{folder}'")
    bad = worker_findings(
        f"[[models]]\nname = 'm'\nfolder = '{folder}'\nfacts = {{ sha256 = {{ 'config.json' = '00' }} }}"
    )
    gone = worker_findings("[[models]]\nname = 'm'\nfolder = 'gone'")
    elsewhere = worker_findings("[[models]]\nname = 'org/elsewhere'")

    assert [found(each, "model").status for each in (good, bad, gone, elsewhere)] == ["ok", "fail", "fail", "warn"]
    assert found(good, "memory").status in ("ok", "warn")


@pytest.mark.parametrize(
    "text", ["presets_dir = '/nowhere'", "[[models]]\nname = 'm'\nfolder = '.'\ntuning = { x = 1 }"]
)
def test_a_preset_that_does_not_load_is_a_finding(text: str) -> None:
    assert found(worker_findings(text), "model").status == "fail"


def test_a_device_that_is_not_there_is_a_finding(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path / "m")

    findings = worker_findings(f"[[models]]\nname = 'm'\nfolder = '{folder}'", APPLIANCE_WORKER_DEVICE="cuda:99")

    assert found(findings, "device").status == "fail"
    assert found(findings, "model").status == "ok"


def test_a_state_dir_that_is_a_file_is_a_finding() -> None:
    Path("taken").write_text("")

    findings = list(examine(config_file=None, environ={"APPLIANCE_STATE_DIR": "taken"}, role="gateway"))

    assert found(findings, "disk").status == "fail"


def test_the_containers_memory_limit_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "CGROUP", tmp_path)
    unlimited = doctor.available_memory()
    (tmp_path / "memory.max").write_text("1048576\n")
    (tmp_path / "memory.current").write_text("1000000\n")

    assert doctor.available_memory() == 48576
    assert unlimited > 48576


def test_the_report_says_what_to_do() -> None:
    text = render([Finding("port", "ok", "free"), Finding("disk", "fail", "full", "free some")])

    assert "FAIL" in text
    assert "-> free some" in text
    assert text.endswith("1 to repair")
    assert render([]) == "nothing to repair"


def test_the_command_exits_with_1_when_something_fails(listener: int) -> None:
    runner = CliRunner()
    bad = runner.invoke(
        doctor_command,
        ["--role", "gateway", "--json"],
        env={"APPLIANCE_PORT": str(listener), "APPLIANCE_NATS_URL": f"nats://127.0.0.1:{listener}"},
    )
    good = runner.invoke(
        doctor_command,
        ["--role", "gateway"],
        env={"APPLIANCE_PORT": str(free_port()), "APPLIANCE_NATS_URL": f"nats://127.0.0.1:{listener}"},
    )

    assert (bad.exit_code, good.exit_code) == (1, 0)
    assert found(msgspec.json.decode(bad.stdout, type=list[Finding]), "port").status == "fail"
    assert "nothing to repair" in good.stdout


def test_config_show_check_and_list() -> None:
    runner = CliRunner()
    env = {"APPLIANCE_API_KEY": "hunter2hunter2", "APPLIANCE_PROT": "1"}

    shown = runner.invoke(config_group, ["show"], env=env)
    checked = runner.invoke(config_group, ["check"], env=env)
    listed = runner.invoke(config_group, ["list"])

    assert (shown.exit_code, checked.exit_code, listed.exit_code) == (0, 0, 0)
    assert "hunter2" not in shown.output
    assert "# env APPLIANCE_API_KEY" in shown.stdout
    assert 'did you mean "APPLIANCE_PORT"?' in shown.stderr
    assert "APPLIANCE_NATS_URL" in listed.stdout


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[gateway]\nport = 0", "gateway.port"),
        ("[[models]]\nname = 'm'\ntuning = { x = 1 }", "unknown key x"),
        ("presets_dir = '/nowhere'", "presets_dir"),
    ],
)
def test_config_check_names_what_is_wrong(text: str, part: str) -> None:
    Path("broken.toml").write_text(text)

    result = CliRunner().invoke(config_group, ["check", "--config", "broken.toml"])

    assert result.exit_code == 1
    assert part in result.stderr
