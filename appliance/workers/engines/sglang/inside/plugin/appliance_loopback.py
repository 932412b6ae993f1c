"""Runs inside SGLang: what torch's processes use to find each other listens on loopback alone.

`torch.distributed` opens its store on every interface of the machine, whatever address it is given, and asks nobody for
a key. Given a socket that is bound already it takes that.
"""

import importlib
import socket
from typing import Any

from torch._C._distributed_c10d import TCPStore

LOOPBACK = frozenset({"127.0.0.1", "localhost"})
_BACKLOG = 64


class LoopbackStore(TCPStore):
    """A `TCPStore` that, where it is the server for a loopback address, listens there and nowhere else."""

    def __init__(self, host_name: str, port: int, **options: Any) -> None:
        if options.get("is_master") and host_name in LOOPBACK and options.get("master_listen_fd") is None:
            options["master_listen_fd"] = _listening(port)
        super().__init__(host_name, port, **options)


def use_loopback() -> None:
    """For every process group that this process opens from now on."""
    # The module: `torch.distributed.rendezvous` is its function.
    vars(importlib.import_module("torch.distributed.rendezvous"))["TCPStore"] = LoopbackStore


def _listening(port: int) -> int:
    """The descriptor of a socket; the store closes it."""
    listener = socket.create_server(("127.0.0.1", port), backlog=_BACKLOG)
    return listener.detach()
