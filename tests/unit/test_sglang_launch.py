"""With what SGLang is started, why it ended, and what may be asked of it."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.workers.engines.sglang.adapter import check_info, sizes_of
from appliance.workers.engines.sglang.client import ENDPOINTS, Client, ServerInfo
from appliance.workers.engines.sglang.command import sglang_command
from appliance.workers.engines.sglang.environment import Environment
from appliance.workers.engines.sglang.flags import ALLOWED, checked
from appliance.workers.engines.sglang.launch import check_device, command_of, config_of, environment_of
from appliance.workers.engines.sglang.server import reason
from appliance.workers.wire import Load

INFO = ServerInfo("0.5.23", 8192, 2042, trust_remote_code=False, enable_custom_logit_processor=False)


def load(device: str = "cpu", **fields: Any) -> Load:
    return Load("m", "/models/m", "bfloat16", device, 2, task="generate", **fields)


def config(order: Load, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(config_of(order, port=1234, key="secret", **options))
    return found


def test_a_cpu_takes_plain_pytorch_and_a_preset_wins() -> None:
    found = config(load(flags={"max-total-tokens": 100, "enable-lora": True, "lora-target-modules": "q_proj, v_proj"}))

    assert found["device"] == "cpu"
    assert found["attention-backend"] == "torch_native"
    assert found["lora-backend"] == "torch_native"
    assert found["max-total-tokens"] == 100
    assert found["lora-target-modules"] == ["q_proj", "v_proj"]


def test_a_gpu_is_chosen_by_its_number() -> None:
    found = config(load("cuda:3", flags={"mem-fraction-static": 0.6}))

    assert (found["device"], found["base-gpu-id"], found["mem-fraction-static"]) == ("cuda", 3, 0.6)
    assert "attention-backend" not in found


def test_it_listens_on_loopback_with_a_key_and_loads_no_code() -> None:
    found = config(load())

    assert (found["host"], found["port"], found["api-key"]) == ("127.0.0.1", 1234, "secret")
    assert found["load-format"] == "safetensors"
    assert found["model-path"] == "/models/m"
    assert "trust-remote-code" not in found
    assert "enable-custom-logit-processor" not in found


@pytest.mark.parametrize(
    ("wanted", "models", "expected"), [(4096, 2048, 2048), (1024, 2048, 1024), (4096, None, 4096), (0, 2048, None)]
)
def test_the_length_is_within_the_models_own(wanted: int, models: int | None, expected: int | None) -> None:
    found = config(load(tokens_max=wanted, sequences_max=5), model_tokens_max=models)

    assert found.get("context-length") == expected
    assert found["max-running-requests"] == 5


@pytest.mark.parametrize(
    "name",
    [
        "host",
        "port",
        "api-key",
        "admin-api-key",
        "trust-remote-code",
        "trust-remote",
        "enable-custom-logit-processor",
        "model-path",
        "load-format",
        "config",
        "lora-paths",
        "grammar-backend",
        "--tp-size",
        "tp_size",
        "",
    ],
)
def test_a_flag_that_nobody_looked_at_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be set by a preset"):
        config(load(flags={name: "x"}))


def test_a_flag_in_another_spelling_is_told_its_own() -> None:
    with pytest.raises(ValueError, match='write it "tp-size"'):
        checked({"--tp_size": 2})


@pytest.mark.parametrize("value", ["", "/etc/passwd", "-x", "a\nb", "$(x)", "x" * 201])
def test_a_value_is_a_word(value: str) -> None:
    with pytest.raises(ValueError, match="schedule-policy"):
        checked({"schedule-policy": value})


def test_what_runs_code_or_opens_a_door_is_in_no_list() -> None:
    doors = (
        "host",
        "port",
        "key",
        "trust",
        "processor",
        "path",
        "url",
        "config",
        "hook",
        "plugin",
        "template",
        "remote",
    )

    assert not [flag for flag in ALLOWED if any(door in flag for door in doors)]


def test_the_key_is_no_argument() -> None:
    command = command_of(Environment(Path("/e")), Path("/c.yaml"))

    assert command == ["/e/bin/python", "-W", "ignore", "-m", "sglang.launch_server", "--config", "/c.yaml"]


def test_the_variables_are_ours() -> None:
    inherited = {"PATH": "/bin", "SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES": "1", "APPLIANCE_API_KEY": "k"}
    inherited |= {"PYTHONPATH": "/evil", "SGLANG_PLUGINS": "other", "CUDA_VISIBLE_DEVICES": "1"}
    cpu, cuda = (environment_of(kind, inherited, threads=2) for kind in ("cpu", "cuda"))

    assert cpu["PATH"] == "/bin"
    assert cpu["CUDA_VISIBLE_DEVICES"] == "1"
    assert cpu["SGLANG_PLUGINS"] == "appliance"
    assert cpu["OMP_NUM_THREADS"] == "2"
    assert not {"SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES", "APPLIANCE_API_KEY"} & cpu.keys()
    folders = [Path(folder) for folder in cpu["PYTHONPATH"].split(":")]
    assert [folder.name for folder in folders] == ["plugin", "cpu"]
    assert all(folder.is_dir() for folder in folders)
    assert "SGLANG_USE_CPU_ENGINE" not in cuda
    assert cuda["PYTHONPATH"] == str(folders[0])


@pytest.mark.parametrize(("device", "kind"), [("cpu", "cuda"), ("cuda:0", "cpu")])
def test_an_environment_for_something_else_is_refused(device: str, kind: Any) -> None:
    with pytest.raises(ValueError, match="--kind"):
        check_device(device, kind)


def test_the_node_starts_the_adapter_under_its_own_interpreter() -> None:
    command = sglang_command(Path("/state/engines/sglang"), threads=4)

    assert command[1:] == [
        "-m",
        "appliance.workers.engines.sglang.host",
        "--environment",
        "/state/engines/sglang",
        "--threads",
        "4",
    ]


@pytest.mark.parametrize("version", ["0.5.22", "0.5", "0.4.99", "weird", "0.5.x"])
def test_an_old_server_is_refused(version: str) -> None:
    with pytest.raises(ValueError, match=r"0\.5\.23"):
        check_info(msgspec.structs.replace(INFO, version=version))


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.6.0", "1.0.0+cu130"])
def test_a_new_one_is_taken(version: str) -> None:
    check_info(msgspec.structs.replace(INFO, version=version))


@pytest.mark.parametrize("field", ["trust_remote_code", "enable_custom_logit_processor"])
def test_a_server_that_runs_a_strangers_code_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="must be off"):
        check_info(msgspec.structs.replace(INFO, **{field: True}))
    silent = msgspec.json.decode(
        b'{"version":"0.5.23","max_total_num_tokens":1,"max_req_input_len":1}', type=ServerInfo
    )
    with pytest.raises(ValueError, match="must be off"):
        check_info(silent)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/update_weights_from_disk"),
        ("POST", "/update_weights_from_tensor"),
        ("POST", "/load_lora_adapter_from_tensors"),
        ("PUT", "/generate"),
        ("POST", "/v1/rerank"),
        ("POST", "/set_internal_state"),
        ("GET", "/health/../v1/models"),
        ("GET", "/flush_cache"),
    ],
)
async def test_no_other_endpoint_is_ever_called(method: str, path: str) -> None:
    async with Client("http://127.0.0.1:1", key="k") as client:
        with pytest.raises(ValueError, match="never called"):
            await client._ask(method, path, timeout_s=1.0)
    assert len(ENDPOINTS) == 6


@pytest.mark.parametrize(
    ("config_json", "expected"),
    [
        ('{"vocab_size":10,"max_position_embeddings":20}', (10, 20)),
        ('{"vocab_size":10}', (10, None)),
        ('{"vocab_size":1,"text_config":{"vocab_size":30,"max_position_embeddings":40}}', (30, 40)),
        ('{"vocab_size":10,"text_config":{"max_position_embeddings":40}}', (10, 40)),
    ],
)
def test_a_models_sizes_are_read(tmp_path: Path, config_json: str, expected: tuple[int, int | None]) -> None:
    (tmp_path / "config.json").write_text(config_json)
    sizes = sizes_of(tmp_path)

    assert (sizes.vocabulary, sizes.tokens_max) == expected


@pytest.mark.parametrize("config_json", [None, "{}", "[]", "{", '{"vocab_size":"many"}'])
def test_a_model_that_does_not_say_is_refused(tmp_path: Path, config_json: str | None) -> None:
    if config_json is not None:
        (tmp_path / "config.json").write_text(config_json)

    with pytest.raises(ValueError, match=r"config\.json"):
        sizes_of(tmp_path)


@pytest.mark.parametrize(
    ("returncode", "lines", "code", "words"),
    [
        (2, ["usage: …", "sglang serve: error: argument --x: invalid choice: 'y'"], "invalid", "argument --x"),
        (1, ["RuntimeError: CUDA out of memory. Tried …"], "oom", "too little memory"),
        (1, ["Traceback …", "ValueError: bad model at /secret/place"], "failed", "bad model at <path>"),
        (-9, ["all well"], "failed", "killed by signal 9"),
        (0, [], "failed", "status 0"),
    ],
)
def test_why_a_server_ended(returncode: int, lines: list[str], code: str, words: str) -> None:
    death = reason(returncode, lines)

    assert (death.code, words in str(death)) == (code, True), death
