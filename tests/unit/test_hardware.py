"""The hardware class: names, flags, and what is said when a device is missing."""

import subprocess

import pytest

from appliance import hardware
from appliance.errors import StartupError
from appliance.hardware import (
    GPU_CLASSES,
    Gpu,
    GpuQuery,
    Hardware,
    choose,
    cpu_class,
    detect,
    gpu_class,
    parse_nvidia_smi,
    query_gpus,
    read_answer,
    visible_gpus,
)

L4 = Gpu("NVIDIA L4", 23034, "580.95.05")
H200 = Gpu("NVIDIA H200", 143771, "580.95.05")
AMX = "processor\t: 0\nflags\t\t: fpu sse amx_bf16 amx_tile\nbugs\t\t: none\n"


@pytest.mark.parametrize(
    ("name", "memory_mib", "expected"),
    [
        ("NVIDIA L4", 23034, "l4"),
        ("NVIDIA L40S", 46068, "l40s"),
        ("NVIDIA L40", 46068, "gpu"),
        ("NVIDIA A100-SXM4-40GB", 40960, "a100-40"),
        ("NVIDIA A100-PCIE-40GB", 40536, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 81920, "a100-80"),
        ("NVIDIA A100 80GB PCIe", 81920, "a100-80"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 97887, "rtx-pro-6000"),
        ("NVIDIA RTX 6000 Ada Generation", 49140, "gpu"),
        ("NVIDIA H100 80GB HBM3", 81559, "h100"),
        ("NVIDIA H100 NVL", 95830, "h100"),
        ("NVIDIA H200", 143771, "h200"),
        ("NVIDIA GH200 480GB", 97871, "gpu"),
        ("Tesla T4", 15360, "gpu"),
        ("", 0, "gpu"),
    ],
)
def test_gpu_names_map_to_classes(name: str, memory_mib: int, expected: str) -> None:
    assert gpu_class(name, memory_mib=memory_mib) == expected
    assert expected in GPU_CLASSES


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        (AMX, "cpu-amx"),
        ("flags : avx512_bf16", "cpu-amx"),
        ("flags : avx512f amx_tile", "cpu"),
        ("model name : amx_bf16\nflags : fpu", "cpu"),
        ("flags : xamx_bf16", "cpu"),
        ("", "cpu"),
    ],
)
def test_cpu_flags_map_to_classes(cpuinfo: str, expected: str) -> None:
    assert cpu_class(cpuinfo) == expected


def test_nvidia_smi_is_read_line_by_line() -> None:
    text = "NVIDIA L4, 23034 MiB, 580.95.05\nNVIDIA H200, 143771 MiB, 580.95.05\n\n"

    assert parse_nvidia_smi(text) == (L4, H200)


@pytest.mark.parametrize("text", ["NVIDIA L4", "NVIDIA L4, [N/A], 580", "a, b, c", "Failed to initialize NVML"])
def test_other_output_is_a_problem_not_a_gpu(text: str) -> None:
    with pytest.raises(ValueError, match="nvidia-smi said"):
        parse_nvidia_smi(text)
    assert "nvidia-smi said" in read_answer(0, text, "", visible=None).problem


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (L4, H200)),
        ("", ()),
        ("-1", ()),
        ("1", (H200,)),
        ("1,0", (H200, L4)),
        ("0,7,1", (L4,)),
        ("GPU-8932f937", (L4, H200)),
    ],
)
def test_cuda_visible_devices_selects_as_cuda_does(visible: str | None, expected: tuple[Gpu, ...]) -> None:
    assert visible_gpus((L4, H200), visible) == expected


@pytest.mark.parametrize(
    ("device", "query", "expected"),
    [
        ("cpu", GpuQuery((L4,)), Hardware("cpu-amx", ("cpu",))),
        ("cpu", GpuQuery(problem="broken"), Hardware("cpu-amx", ("cpu",))),
        ("auto", GpuQuery(), Hardware("cpu-amx", ("cpu",))),
        ("auto", GpuQuery((L4, H200)), Hardware("l4", ("cuda:0",), L4)),
        ("auto", GpuQuery((L4, H200, L4)), Hardware("l4", ("cuda:0", "cuda:2"), L4)),
        ("cuda:1", GpuQuery((L4, H200)), Hardware("h200", ("cuda:1",), H200)),
    ],
)
def test_the_device_setting_decides(device: str, query: GpuQuery, expected: Hardware) -> None:
    assert choose(device, query, cpuinfo=AMX) == expected


@pytest.mark.parametrize(
    ("device", "query", "part"),
    [
        ("cuda:0", GpuQuery(), "shows 0 GPUs"),
        ("cuda:2", GpuQuery((L4, H200)), "shows 2 GPUs"),
        ("auto", GpuQuery(problem="version mismatch"), "version mismatch"),
        ("gpu", GpuQuery((L4,)), '"cuda:N"'),
        ("", GpuQuery(), '"cuda:N"'),
        ("cuda:0 ", GpuQuery((L4,)), '"cuda:N"'),
    ],
)
def test_a_device_that_is_not_there_stops_start_up(device: str, query: GpuQuery, part: str) -> None:
    with pytest.raises(StartupError) as caught:
        choose(device, query, cpuinfo="")

    assert part in caught.value.message


@pytest.mark.parametrize(
    ("returncode", "stdout", "stderr", "expected"),
    [
        (0, "NVIDIA L4, 23034 MiB, 580.95.05\n", "", GpuQuery((L4,))),
        (6, "No devices were found\n", "", GpuQuery()),
        (18, "Failed to initialize NVML: Driver/library version mismatch\nNVML 580\n", "", None),
        (9, "", "", None),
    ],
)
def test_exit_status_and_output_are_told_apart(
    returncode: int, stdout: str, stderr: str, expected: GpuQuery | None
) -> None:
    answer = read_answer(returncode, stdout, stderr, visible=None)

    if expected is None:
        assert answer.problem
        assert not answer.gpus
    else:
        assert answer == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError(), GpuQuery()),
        (PermissionError(13, "Permission denied"), GpuQuery(problem="nvidia-smi cannot be run: Permission denied")),
        (subprocess.TimeoutExpired("nvidia-smi", 20), GpuQuery(problem="nvidia-smi gave no answer in 20 s")),
    ],
)
def test_a_missing_or_hanging_nvidia_smi_never_raises(
    error: Exception, expected: GpuQuery, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **options: object) -> None:
        assert options["timeout"] == hardware.NVIDIA_SMI_TIMEOUT_S
        raise error

    monkeypatch.setattr(subprocess, "run", fail)

    assert query_gpus(visible=None) == expected


def test_the_cpu_of_this_machine_has_a_class() -> None:
    assert detect("cpu", environ={}).kind in hardware.CPU_CLASSES


@pytest.mark.gpu
def test_the_gpu_of_this_machine_is_found() -> None:
    if not query_gpus(visible=None).gpus:
        pytest.skip("needs an NVIDIA GPU")
    assert detect("auto", environ={}).devices[0] == "cuda:0"
