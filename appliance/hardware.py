"""The hardware class of this machine, which chooses a preset's tuning: "cpu", "cpu-amx", "l4", … or "gpu".

Parsing and deciding are pure. `detect` is the one function that asks the machine, within a bounded time.
"""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from appliance.errors import StartupError

CPUINFO_FILE = Path("/proc/cpuinfo")
NVIDIA_SMI_TIMEOUT_S = 20.0  # a cold driver without persistence takes several seconds
_QUERY = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
_A100_40_MIB_MAX = 45_000  # between the 40 GiB and the 80 GiB card

# The first pattern found in the driver's name decides.
_CLASSES = (
    (re.compile(r"\bL4\b"), "l4"),
    (re.compile(r"\bL40S\b"), "l40s"),
    (re.compile(r"\bA100"), "a100"),
    (re.compile(r"\bH100\b"), "h100"),
    (re.compile(r"\bH200\b"), "h200"),
    (re.compile(r"\bRTX PRO 6000\b"), "rtx-pro-6000"),
)
GPU_CLASSES = ("l4", "l40s", "a100-40", "a100-80", "h100", "h200", "rtx-pro-6000", "gpu")
CPU_CLASSES = ("cpu", "cpu-amx")


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU, as its driver describes it."""

    name: str
    memory_mib: int
    driver: str


@dataclass(frozen=True)
class GpuQuery:
    """What nvidia-smi said. `problem` is empty where all is well, and where there simply is no GPU."""

    gpus: tuple[Gpu, ...] = ()
    problem: str = ""


@dataclass(frozen=True)
class Hardware:
    """Where engines run."""

    kind: str  # the class that chooses tuning; the same for all devices
    devices: tuple[str, ...]  # torch's names: ("cpu",), ("cuda:0", "cuda:1")
    gpu: Gpu | None = None  # the first of them


def detect(device: str, *, environ: Mapping[str, str]) -> Hardware:
    """The hardware that `worker.device` names. Blocks on nvidia-smi, at most `NVIDIA_SMI_TIMEOUT_S`.

    Raises `StartupError` for a device that is not there or no device name.
    """
    query = GpuQuery() if device == "cpu" else query_gpus(visible=environ.get("CUDA_VISIBLE_DEVICES"))
    return choose(device, query, cpuinfo=read_cpuinfo())


def choose(device: str, query: GpuQuery, *, cpuinfo: str) -> Hardware:
    """Decide on devices: "auto" takes every GPU of the first one's class, else the CPU. Raises like `detect`."""
    if device == "cpu" or (device == "auto" and not query.gpus and not query.problem):
        return Hardware(cpu_class(cpuinfo), ("cpu",))
    index = 0 if device == "auto" else _cuda_index(device)
    if query.problem:
        # Falling back to the CPU would serve 50 times slower without a word.
        raise StartupError(
            f'worker.device is "{device}" and the GPU driver does not answer: {query.problem}; repair the driver, or '
            'set APPLIANCE_WORKER_DEVICE to "cpu"'
        )
    if index >= len(query.gpus):
        raise StartupError(
            f'worker.device is "{device}" and this machine shows {len(query.gpus)} GPUs; take "auto", "cpu" or a '
            "lower number, and see `nvidia-smi`"
        )
    gpu = query.gpus[index]
    kind = gpu_class(gpu.name, memory_mib=gpu.memory_mib)
    if device != "auto":
        return Hardware(kind, (f"cuda:{index}",), gpu)
    # One preset tunes them all, so a machine of mixed GPUs runs one worker a class, each with `worker.device`.
    alike = [
        number for number, other in enumerate(query.gpus) if gpu_class(other.name, memory_mib=other.memory_mib) == kind
    ]
    return Hardware(kind, tuple(f"cuda:{number}" for number in alike), gpu)


def gpu_class(name: str, *, memory_mib: int) -> str:
    """The class of a GPU by its driver's name; "gpu" for one that has no class of its own."""
    kind = next((kind for pattern, kind in _CLASSES if pattern.search(name)), "gpu")
    if kind == "a100":
        return "a100-40" if memory_mib <= _A100_40_MIB_MAX else "a100-80"
    return kind


def cpu_class(cpuinfo: str) -> str:
    """ "cpu-amx" where the CPU multiplies bfloat16 in hardware (AMX or AVX512-BF16), else "cpu"."""
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    has_bfloat16 = flags is not None and {"amx_bf16", "avx512_bf16"} & set(flags.group(1).split())
    return "cpu-amx" if has_bfloat16 else "cpu"


def parse_nvidia_smi(text: str) -> tuple[Gpu, ...]:
    """Read nvidia-smi's CSV ("NVIDIA L4, 23034 MiB, 580.95.05"). Raises ValueError for a line of another shape."""
    return tuple(_parse_line(line) for line in text.splitlines() if line.strip())


def visible_gpus(gpus: tuple[Gpu, ...], visible: str | None) -> tuple[Gpu, ...]:
    """Apply CUDA_VISIBLE_DEVICES, as CUDA does: an index that is not there hides itself and all after it.

    GPU UUIDs are not resolved: then all GPUs count as visible.
    """
    if visible is None:
        return gpus
    chosen: list[Gpu] = []
    for part in filter(None, (part.strip() for part in visible.split(","))):
        if part.upper().startswith(("GPU-", "MIG-")):
            return gpus
        if not part.isdecimal() or int(part) >= len(gpus):
            break
        chosen.append(gpus[int(part)])
    return tuple(chosen)


def query_gpus(*, visible: str | None) -> GpuQuery:
    """Ask nvidia-smi. `visible` is CUDA_VISIBLE_DEVICES, None where it is not set. Never raises."""
    try:
        done = subprocess.run(  # noqa: S603 - a constant command
            _QUERY, capture_output=True, text=True, errors="replace", timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return GpuQuery()
    except subprocess.TimeoutExpired:
        return GpuQuery(problem=f"nvidia-smi gave no answer in {NVIDIA_SMI_TIMEOUT_S:g} s")
    except OSError as exc:
        return GpuQuery(problem=f"nvidia-smi cannot be run: {exc.strerror}")
    return read_answer(done.returncode, done.stdout, done.stderr, visible=visible)


def read_answer(returncode: int, stdout: str, stderr: str, *, visible: str | None) -> GpuQuery:
    """What nvidia-smi's exit status and output mean."""
    said = f"{stdout}\n{stderr}".strip()
    if "No devices were found" in said:
        return GpuQuery()
    if returncode != 0:
        return GpuQuery(problem=said.splitlines()[0][:200] if said else f"nvidia-smi ended with {returncode}")
    try:
        return GpuQuery(visible_gpus(parse_nvidia_smi(stdout), visible))
    except ValueError as exc:
        return GpuQuery(problem=str(exc))


def read_cpuinfo() -> str:
    """The kernel's description of the CPU; empty where there is none."""
    try:
        return CPUINFO_FILE.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cuda_index(device: str) -> int:
    found = re.fullmatch(r"cuda:([0-9]{1,3})", device)
    if not found:
        raise StartupError(f'worker.device is {device[:40]!r}, it must be "auto", "cpu" or "cuda:N" ("cuda:0")')
    return int(found.group(1))


def _parse_line(line: str) -> Gpu:
    parts = [part.strip() for part in line.rsplit(",", 2)]
    memory = re.fullmatch(r"(\d+) MiB", parts[1]) if len(parts) == 3 else None
    if not memory:
        raise ValueError(f"nvidia-smi said {line[:80]!r}, expected name, memory in MiB and driver version")
    return Gpu(parts[0], int(memory.group(1)), parts[2])
