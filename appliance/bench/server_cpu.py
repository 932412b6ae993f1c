"""CPU seconds of the server under test, when it runs on this machine.

The server is whoever listens on the port, and its family: from there up through parents that run the same program (a
supervisor of its own), then everything below. Never this client, nor what started it.
"""

import socket
from collections.abc import Iterable

import psutil

CpuTimes = dict[tuple[int, float], float]  # seconds by process and its start


class ServerCpu:
    """Adds up a family's CPU time between two looks. Processes that come meanwhile count, those that go are lost."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root

    def times(self) -> CpuTimes:
        """User and system time of every member so far. Empty once the server is gone."""
        found: CpuTimes = {}
        for process in family(self._root):
            try:
                times = process.cpu_times()
                found[process.pid, process.create_time()] = times.user + times.system
            except psutil.Error:
                continue
        return found


def spent_s(before: CpuTimes, after: CpuTimes) -> float:
    """CPU seconds between two looks. Pure."""
    return sum(max(0.0, seconds - before.get(process, 0.0)) for process, seconds in after.items())


def find_server(host: str, port: int, *, pid: int | None = None) -> ServerCpu | None:
    """The local server at this address, or the process `pid` and all below it; None where there is none to see."""
    if pid is not None:
        try:
            return ServerCpu(psutil.Process(pid))
        except psutil.NoSuchProcess:
            return None
    if not is_local(host):
        return None
    listeners = _listeners(port)
    return ServerCpu(_top(listeners[0])) if listeners else None


def is_local(host: str) -> bool:
    """Whether the host name is one of this machine's own addresses. Resolves it; may block."""
    own = {address.address for addresses in psutil.net_if_addrs().values() for address in addresses}
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return bool(found & own)


def family(root: psutil.Process) -> list[psutil.Process]:
    """A process and all below it; empty when it is gone."""
    try:
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _listeners(port: int) -> list[psutil.Process]:
    """Those who listen on the port, as far as this user may see."""
    try:
        connections: Iterable[psutil._ntuples.sconn] = psutil.net_connections("tcp")
    except psutil.AccessDenied:
        return []
    pids = {
        connection.pid
        for connection in connections
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
    }
    return [psutil.Process(pid) for pid in sorted(pid for pid in pids if pid and psutil.pid_exists(pid))]


def _top(process: psutil.Process) -> psutil.Process:
    """The highest ancestor that runs the same program, below anything that this client descends from."""
    ours = {psutil.Process().pid, *(parent.pid for parent in psutil.Process().parents())}
    try:
        program = process.exe()
        while (parent := process.parent()) is not None and parent.pid not in ours and parent.exe() == program:
            process = parent
    except psutil.Error:
        pass  # an ancestor of somebody else's: the family begins below it
    return process
