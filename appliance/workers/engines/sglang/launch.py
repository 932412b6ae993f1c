"""With what SGLang is started: its configuration file and the environment of its processes. Pure.

It is started with a file instead of arguments, as arguments are seen by every user of the machine and one is a key.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from appliance.workers.engines.sglang.environment import Environment, Kind
from appliance.workers.engines.sglang.flags import Flag, checked
from appliance.workers.wire import Load

HOST: Final = "127.0.0.1"
GRAMMARS: Final = "appliance"  # the plugin in `inside/plugin`, by its entry point and as a grammar backend
_INSIDE: Final = Path(__file__).with_name("inside")

# What a preset may change. On a CPU: the paths in plain PyTorch, and sizes for trials.
_CPU_FLAGS: Final[Mapping[str, Flag]] = {
    "attention-backend": "torch_native",
    "sampling-backend": "pytorch",
    "cuda-graph-backend-decode": "disabled",
    "cuda-graph-backend-prefill": "disabled",
    "lora-backend": "torch_native",
    "max-running-requests": 8,
    "max-total-tokens": 16_384,
    "mem-fraction-static": 0.3,
}
_FLAGS: Final[Mapping[str, Flag]] = {"log-level": "warning", "decode-log-interval": 1000}


def check_device(device: str, kind: Kind) -> None:
    """Raises ValueError where the environment is not for the device."""
    is_cpu = device == "cpu"
    if is_cpu != (kind == "cpu"):
        wanted = "cpu" if is_cpu else "cuda"
        raise ValueError(
            f"SGLang is installed for {kind} and the device is {device}; run `appliance engines install sglang "
            f"--kind {wanted}`"
        )


def config_of(order: Load, *, port: int, key: str, model_tokens_max: int | None = None) -> str:
    """SGLang's configuration file, in JSON, which is YAML. Raises ValueError for a flag that a preset may not set.

    `model_tokens_max` is the model's own length, where its files say: SGLang does not start with more.
    """
    is_cpu = order.device == "cpu"
    chosen = {**_FLAGS, **(_CPU_FLAGS if is_cpu else {}), **_limits(order, model_tokens_max), **order.flags}
    if not chosen.get("enable-lora"):
        chosen.pop("lora-backend", None)
    own: dict[str, Flag | list[str]] = {
        "host": HOST,
        "port": port,
        "api-key": key,
        "model-path": order.folder,
        "served-model-name": order.model,
        "load-format": "safetensors",
        "dtype": order.dtype,
        "device": "cpu" if is_cpu else "cuda",
        "grammar-backend": GRAMMARS,
        "incremental-streaming-output": True,
        "log-level-http": "warning",
    }
    if not is_cpu:
        own["base-gpu-id"] = int(order.device.rpartition(":")[2])
    return json.dumps({**checked(chosen), **own})


def _limits(order: Load, model_tokens_max: int | None) -> dict[str, Flag]:
    length = min(order.tokens_max, model_tokens_max) if model_tokens_max else order.tokens_max
    limits = {"max-running-requests": order.sequences_max, "context-length": length}
    return {name: limit for name, limit in limits.items() if limit}


def command_of(environment: Environment, config: Path) -> list[str]:
    """The command that starts the server."""
    return [str(environment.python), "-W", "ignore", "-m", "sglang.launch_server", "--config", str(config)]


def environment_of(kind: Kind, inherited: Mapping[str, str], *, threads: int) -> dict[str, str]:
    """The variables of SGLang's processes: ours for it in place of any that came in, as flags come from the preset."""
    ours = ("SGLANG_", "SGL_", "APPLIANCE_", "DUMPER_", "AIP_")
    kept = {name: value for name, value in inherited.items() if not name.startswith(ours)}
    for name in ("PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV"):
        kept.pop(name, None)
    folders = [_INSIDE / "plugin"] + ([_INSIDE / "cpu"] if kind == "cpu" else [])
    kept |= {
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        "PYTHONNOUSERSITE": "1",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "SGLANG_PLUGINS": GRAMMARS,
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "1",  # before temperature
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health says that it is up, and generates nothing
        "TOKENIZERS_PARALLELISM": "false",
        # Several GPUs are of one machine.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    if kind == "cpu":
        kept |= {
            "SGLANG_USE_CPU_ENGINE": "1",
            "OMP_NUM_THREADS": str(threads or os.cpu_count() or 1),
            "OMP_WAIT_POLICY": "PASSIVE",
        }
    return kept
