"""`appliance doctor`: look at this machine and say what would keep the appliance from running, and what to do.

It asks, `checks.py` concludes. Nothing here changes anything, downloads anything, or stops at the first problem; a
broken configuration is a finding like any other.
"""

import errno
import importlib.util
import os
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import click
import msgspec
import psutil

from appliance.cli import checks
from appliance.cli.checks import Finding, PortState, TorchBuild
from appliance.cli.model_checks import check_model, engine_needs
from appliance.cli.plan import PlannedModel
from appliance.cli.startup import Role, catalog_of, config_option, role_option
from appliance.errors import StartupError
from appliance.hardware import GpuQuery, choose, query_gpus, read_cpuinfo
from appliance.settings import Settings
from appliance.settings_source import read_settings
from appliance.workers.engines.sglang.environment import Environment, has_adapter_client

NATS_PORT = 4222
CONNECT_TIMEOUT_S = 3.0
HUB = "https://huggingface.co"
_PROXIES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")
CGROUP = Path("/sys/fs/cgroup")
_MARKS = {"ok": ("ok  ", "green"), "warn": ("warn", "yellow"), "fail": ("FAIL", "red")}


@click.command("doctor")
@config_option
@role_option
@click.option("--json", "is_json", is_flag=True, help="Print findings as JSON.")
def doctor_command(config_file: Path | None, role: Role, is_json: bool) -> None:
    """Check this machine and the configuration.

    Exits with 1 if something would not work.
    """
    findings = list(examine(config_file=config_file, environ=os.environ, role=role))
    click.echo(msgspec.json.encode(findings).decode() if is_json else render(findings))
    sys.exit(1 if any(finding.status == "fail" for finding in findings) else 0)


def render(findings: Iterable[Finding]) -> str:
    """The findings as lines for a terminal."""
    findings = list(findings)
    width = max((len(finding.name) for finding in findings), default=0)
    lines = []
    for finding in findings:
        mark, colour = _MARKS[finding.status]
        lines.append(f"{click.style(mark, fg=colour)}  {finding.name:{width}}  {finding.detail}")
        if finding.action:
            lines.append(f"      {'':{width}}  -> {finding.action}")
    failed = sum(finding.status == "fail" for finding in findings)
    lines.append(f"{failed} to repair" if failed else "nothing to repair")
    return "\n".join(lines)


def examine(*, config_file: Path | None, environ: Mapping[str, str], role: Role) -> Iterator[Finding]:
    """All findings for a role. With a broken configuration the machine is measured against the default one."""
    yield checks.check_python((sys.version_info[0], sys.version_info[1]))
    settings = Settings()
    try:
        loaded = read_settings(config_file=config_file, environ=environ)
    except StartupError as exc:
        yield Finding("settings", "fail", exc.message, "the checks below use the default settings")
    else:
        settings = loaded.settings
        yield Finding("settings", "ok", f"valid, {len(loaded.origins)} set")
        yield from (Finding("settings", "warn", warning) for warning in loaded.warnings)
    if role != "worker":
        yield _names(settings)
        yield checks.check_port(port_state(settings.gateway.host, settings.gateway.port))
    yield _disk(settings)
    yield checks.check_cores(usable_cores(), gateway_processes=0 if role == "worker" else settings.gateway.processes)
    yield from _nats(settings, role=role)
    if role != "gateway":
        yield from _worker(settings, environ=environ)


def _worker(settings: Settings, *, environ: Mapping[str, str]) -> Iterator[Finding]:
    device, build = settings.worker.device, torch_build()
    query = query_gpus(visible=environ.get("CUDA_VISIBLE_DEVICES"))
    yield checks.check_torch(build)
    yield checks.check_gpu(query, device=device, build=build)
    try:
        hardware = choose(device, query, cpuinfo=read_cpuinfo())
    except StartupError as exc:
        yield Finding("device", "fail", exc.message, "the checks below take the CPU")
        hardware = choose("cpu", GpuQuery(), cpuinfo=read_cpuinfo())
    else:
        yield Finding("device", "ok", f"{', '.join(hardware.devices)}, class {hardware.kind}")
    sglang = Environment.of(settings.state_dir)
    yield checks.check_sglang(
        sglang.state(), sglang.installed(), is_gpu=hardware.gpu is not None, has_client=has_adapter_client()
    )
    planned: list[PlannedModel] = []
    for model in settings.models:
        finding, found = check_model(model, settings=settings, hardware=hardware, hub=lambda: hub_problem(environ))
        yield finding
        planned += [found] if found else []
    queue_bytes = 0 if settings.nats.url else settings.queue.interactive_bytes_max
    engines = engine_needs(settings.worker, planned, hardware=hardware, cores=usable_cores())
    yield checks.check_memory(available_bytes=available_memory(), engines=engines, queue_bytes=queue_bytes)
    if hardware.gpu:
        one = replace(hardware, devices=hardware.devices[:1])
        engines = engine_needs(settings.worker, planned, hardware=one, cores=usable_cores())
        yield checks.check_gpu_memory(memory_bytes=hardware.gpu.memory_mib * 2**20, engines=engines)


def hub_problem(environ: Mapping[str, str]) -> str:
    """Why models cannot be downloaded, "" where nothing speaks against it. Blocks for `CONNECT_TIMEOUT_S` at most."""
    if importlib.util.find_spec("huggingface_hub") is None:
        return "its client is not installed (pip install 'appliance[encoder]')"
    if environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        return "HF_HUB_OFFLINE is set"
    if any(environ.get(name) for name in _PROXIES):
        return ""  # only the proxy knows
    host = urlsplit(environ.get("HF_ENDPOINT") or HUB).netloc.rpartition("@")[2]
    reason = _reach(host if ":" in host.rpartition("]")[2] else f"{host}:443")
    return f"{host}: {reason}" if reason else ""


def usable_cores() -> int:
    """Of this machine, for this process."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _names(settings: Settings) -> Finding:
    try:
        names = catalog_of(settings).entries()
    except StartupError as exc:
        return Finding("names", "fail", exc.message, "correct the [[models]] and [[aliases]] tables")
    return Finding("names", "ok", f"{len(names)} public names of {len(settings.models)} models")


def _disk(settings: Settings) -> Finding:
    folder = Path(settings.state_dir).absolute()
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    wanted_bytes = 0 if settings.nats.url else settings.queue.bulk_bytes_max + settings.queue.dead_bytes_max
    return checks.check_disk(
        str(folder),
        free_bytes=shutil.disk_usage(existing).free,
        wanted_bytes=wanted_bytes,
        is_writable=os.path.isdir(existing) and os.access(existing, os.W_OK | os.X_OK),
    )


def _nats(settings: Settings, *, role: Role) -> Iterator[Finding]:
    if settings.nats.url:
        yield checks.check_nats_urls([(address, _reach(address)) for address in nats_addresses(settings.nats.url)])
    elif role == "up":
        yield checks.check_nats_server(nats_server())
    else:
        action = "set APPLIANCE_NATS_URL: parts that run apart meet at one NATS"
        yield Finding("nats", "fail", f"nats.url is not set, which `appliance {role}` needs", action)


def nats_addresses(url: str) -> list[str]:
    """host:port of each server in `nats.url`, without its credentials."""
    addresses = []
    for part in filter(None, (part.strip() for part in url.split(","))):
        location = part.split("://", 1)[-1].rsplit("@", 1)[-1].split("/", 1)[0]
        has_port = location.rpartition("]")[2].count(":") == 1
        addresses.append(location if has_port else f"{location}:{NATS_PORT}")
    return addresses


def _reach(address: str) -> str:
    """Why no TCP connection to host:port can be made; "" when one can."""
    try:
        parts = urlsplit(f"//{address}")
        with socket.create_connection((parts.hostname or "", parts.port or NATS_PORT), timeout=CONNECT_TIMEOUT_S):
            return ""
    except (OSError, ValueError) as exc:
        return getattr(exc, "strerror", None) or str(exc) or type(exc).__name__


def port_state(host: str, port: int) -> PortState:
    """Try to listen on host:port, and let go of it at once."""
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as trial:
            # As servers do: connections of an earlier run that linger are no obstacle, a listener is.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen(1)
    except OSError as exc:
        holder = _listener(port) if exc.errno == errno.EADDRINUSE else ""
        return PortState(host, port, exc.strerror or str(exc), holder)
    return PortState(host, port)


def _listener(port: int) -> str:
    unknown = "a process of another user (root can see which)"
    try:
        for connection in psutil.net_connections(kind="tcp"):
            is_listening = connection.status == psutil.CONN_LISTEN
            if is_listening and connection.pid and connection.laddr and connection.laddr.port == port:
                process = psutil.Process(connection.pid)
                return f"{' '.join(process.cmdline())[:120] or process.name()} (pid {connection.pid})"
    except psutil.Error:
        return unknown
    return unknown


def available_memory() -> int:
    """Bytes that can still be taken: the machine's, or what is left of the container's limit."""
    available = psutil.virtual_memory().available
    try:
        limit = (CGROUP / "memory.max").read_text().strip()
        left = int(limit) - int((CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return int(available)
    return max(0, min(int(available), left))


def torch_build() -> TorchBuild | None:
    """The installed torch, without importing it."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        return checks.parse_torch_version(Path(spec.origin).with_name("version.py").read_text(encoding="utf-8"))
    except OSError:
        return None


def nats_server(which: Callable[[str], str | None] = shutil.which) -> str | None:
    """The path of the nats-server binary: beside this interpreter, where its package puts it, or on PATH."""
    beside = Path(sysconfig.get_path("scripts"), "nats-server")
    return str(beside) if os.access(beside, os.X_OK) else which("nats-server")
