"""What is settled before anything is started, and that every way to start settles the same."""

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result

from appliance.cli import plan
from appliance.cli.config import config_group
from appliance.cli.plan import encoder_engines, plan_model
from appliance.cli.startup import EXIT_CONFIG, Role
from appliance.cli.up import up_command
from appliance.errors import StartupError
from appliance.hardware import Gpu, Hardware
from appliance.presets import GenerationTuning, load_preset, shipped_presets_dir
from appliance.settings import ModelSettings, Settings, WorkerSettings
from appliance.workers.engines.sglang.environment import Environment, Installed, lock_sha256

CPU = Hardware("cpu", ("cpu",))
GPU = Hardware("l4", ("cuda:0", "cuda:1"), Gpu("NVIDIA L4", 23034, "570.10"))
LLAMA = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
}
WRITER = "[[models]]\nname = 'writer'\nfolder = 'writer'\nfacts = { tasks = ['generate'] }\n"
TWICE = """
[[models]]
name = 'writer'
folder = 'writer'
facts = { tasks = ['generate'] }
aliases = ['x']
[[models]]
name = 'other'
folder = 'writer'
facts = { tasks = ['generate'] }
aliases = ['x']
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to start in, with a model that writes beside."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("APPLIANCE_WORKER_DEVICE", "cpu")
    model_in(Path("writer"))


def model_in(folder: Path, **config: object) -> None:
    folder.mkdir(exist_ok=True)
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    (folder / "config.json").write_text(json.dumps(LLAMA | config))
    (folder / "tokenizer.json").write_text("{}")


def writer(**tuning: object) -> ModelSettings:
    return ModelSettings("writer", folder="writer", facts={"tasks": ["generate"]}, tuning=tuning)


def install_sglang(kind: str) -> None:
    marker = Environment.of(Settings().state_dir).marker
    marker.parent.mkdir(parents=True)
    installed = msgspec.convert({"kind": kind, "version": "0.5.23", "lock_sha256": ""}, Installed)
    installed = msgspec.structs.replace(installed, lock_sha256=lock_sha256(installed.kind))
    marker.write_bytes(msgspec.json.encode(installed))


def check(text: str, *, role: Role = "up") -> Result:
    Path("appliance.toml").write_text(text)
    return CliRunner().invoke(config_group, ["check", "--role", role])


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (WRITER.replace("'generate'", "'generate', 'embed'"), "a model that generates does nothing else"),
        (TWICE, 'both claim the public name "x"'),
        ("[[aliases]]\nname = 'a'\nmodel = 'nobody'", "'nobody' is not served"),
        (f"{WRITER}[[aliases]]\nname = 'a'\nmodel = 'writer'\npad_to = 3072", "pad_to is 3072"),
        (WRITER + "tuning = { generation = { sequence_max = 1 } }", "unknown key generation.sequence_max"),
        (WRITER + "tuning = { batch = 1 }", "unknown key batch"),
        (WRITER.replace("'writer'\nfacts", "'gone'\nfacts"), "'gone', which is no directory"),
        (WRITER.replace("'writer'\nfacts", "'gpt2'\nfacts"), "cannot run writer: its model_type is 'gpt2'"),
        (
            WRITER + "tuning = { generation = { runtime = 'sglang', sequences_max = 1, sequence_tokens_max = 64 } }",
            "asks for SGLang, which is not installed",
        ),
        (f"presets_dir = 'mine'\n{WRITER}", "the tuning of writer has no [generation]"),
        (
            WRITER.replace("'writer'\nfacts", "'mute'\nfacts"),
            "the folder of writer cannot be served: it has no tokenizer.json",
        ),
        (WRITER.replace("'writer'\nfacts", "'odd'\nfacts"), "the chat template cannot be read"),
        ("[[models]]\nname = 'chats'\nfolder = 'chats'", 'give it `facts = { tasks = ["generate"] }`'),
    ],
)
@pytest.mark.usefixtures("own_logging")
def test_what_does_not_start_is_not_valid(text: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model_in(Path("gpt2"), model_type="gpt2")
    model_in(Path("mute"))
    Path("mute/tokenizer.json").unlink()
    model_in(Path("odd"))
    Path("odd/chat_template.jinja").write_text("{% if %}")
    model_in(Path("chats"), architectures=["LlamaForCausalLM"])
    Path("chats/chat_template.jinja").write_text("{{ messages[0].content }}")
    tuning = (shipped_presets_dir() / "default" / "cpu.toml").read_text().partition("[generation]")[0]
    for name in ("cpu", "cpu-amx"):
        Path("mine/default").mkdir(parents=True, exist_ok=True)
        Path("mine/default", f"{name}.toml").write_text(tuning)
    monkeypatch.setattr("appliance.cli.up.Appliance", None)  # nothing is started

    checked = check(text)
    started = CliRunner().invoke(up_command)

    assert (checked.exit_code, started.exit_code) == (1, EXIT_CONFIG)
    assert part in checked.stderr
    assert checked.stderr.removeprefix("Error: ") == started.stderr.removeprefix("appliance: ")
    assert not Path(".appliance").exists()


def test_a_role_is_checked_for_what_it_needs() -> None:
    valid, wrong_name, wrong_folder = (
        WRITER,
        f"{WRITER}[[aliases]]\nname = 'a'\nmodel = 'x'",
        WRITER.replace("'writer'\nfacts", "'gone'\nfacts"),
    )
    nats = "[nats]\nurl = 'nats://h'\n"

    assert [check(text).exit_code for text in (valid, wrong_name, wrong_folder)] == [0, 1, 1]
    assert [check(nats + text, role="worker").exit_code for text in (valid, wrong_name, wrong_folder)] == [0, 0, 1]
    assert [check(nats + text, role="gateway").exit_code for text in (valid, wrong_name, wrong_folder)] == [0, 1, 0]
    assert "nats.url is empty" in check(valid, role="gateway").stderr


def test_a_gpu_without_sglang_writes_as_a_cpu_does_and_says_so() -> None:
    planned = plan_model(writer(), Settings(), hardware=GPU)
    fewer = plan_model(writer(generation={"sequences_max": 2}), Settings(), hardware=GPU)

    assert planned.generation == GenerationTuning("embedded", 8, 4096)
    assert "`appliance engines install sglang`" in planned.warning
    assert planned.preset.tuning.dtype == "bfloat16"
    assert fewer.generation == GenerationTuning("embedded", 2, 4096)


@pytest.mark.parametrize(
    "asked",
    [{"flags": {"tp-size": 2}}, {"runtime": "sglang"}, {"runtime": "sglang", "sequences_max": 3}],
)
def test_who_asks_for_sglang_is_told_that_it_is_missing(asked: dict[str, object]) -> None:
    with pytest.raises(StartupError, match="appliance engines install"):
        plan_model(writer(generation=asked), Settings(), hardware=GPU)


def test_with_sglang_a_gpus_preset_is_in_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    install_sglang("cuda")
    preset = load_preset(writer(), hardware="l4", presets_dirs=[shipped_presets_dir()])

    planned = plan_model(writer(), Settings(), hardware=GPU)

    assert (planned.generation, planned.warning) == (preset.tuning.generation, "")
    with pytest.raises(StartupError, match="the flag 'port' of SGLang cannot be set"):
        plan_model(writer(generation={"flags": {"port": 1}}), Settings(), hardware=GPU)
    on_cpu = {"runtime": "sglang", "sequences_max": 1, "sequence_tokens_max": 64}
    with pytest.raises(StartupError, match="installed for cuda and the device is cpu"):
        plan_model(writer(generation=on_cpu), Settings(), hardware=CPU)
    monkeypatch.setattr(plan, "has_adapter_client", lambda: False)
    with pytest.raises(StartupError, match="aiohttp"):
        plan_model(writer(), Settings(), hardware=GPU)


def test_the_embedded_generator_has_no_flags() -> None:
    with pytest.raises(StartupError, match=r"generation\.flags are SGLang's"):
        plan_model(writer(generation={"flags": {"tp-size": 2}}), Settings(), hardware=CPU)


@pytest.mark.parametrize(
    "config", [{"mlp_bias": True}, {"use_sliding_window": True}, {"rope_scaling": {"rope_type": "yarn"}}]
)
def test_a_model_that_differs_from_its_family_is_left_to_sglang(config: dict[str, object]) -> None:
    model_in(Path("writer"), **config)

    with pytest.raises(StartupError, match=r"the embedded generator cannot run writer: .*; SGLang may"):
        plan_model(writer(), Settings(), hardware=CPU)
    assert plan_model(writer(), Settings(worker=WorkerSettings(engine="fake")), hardware=CPU).generation is not None
    install_sglang("cuda")
    assert plan_model(writer(), Settings(), hardware=GPU).generation is not None


def test_a_cpus_cores_are_shared_out_and_a_gpu_has_an_engine() -> None:
    presets = [load_preset(ModelSettings("m"), hardware="cpu", presets_dirs=[shipped_presets_dir()])]

    def places(hardware: Hardware, worker: WorkerSettings) -> tuple[list[str], int]:
        found, threads = encoder_engines(worker, presets, hardware=hardware, cores=4)
        return [name for name, _ in found], threads

    assert places(CPU, WorkerSettings()) == (["cpu/0", "cpu/1", "cpu/2", "cpu/3"], 1)
    assert places(CPU, WorkerSettings(engine_threads=3)) == (["cpu/0"], 3)
    assert places(CPU, WorkerSettings(engines=2)) == (["cpu/0", "cpu/1"], 1)
    assert places(GPU, WorkerSettings())[0] == ["cuda:0", "cuda:1"]
