"""Processes that must not outlive their parent."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens. Linux only; elsewhere a no-op.

    Call it first thing in the child, or between fork and exec: it survives exec. The caller closes the race with a
    parent that is gone already by comparing `os.getppid()`, where it knows its parent's id.
    """
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def exit_if_orphaned(parent_pid: int) -> None:
    """Leave at once if the parent was gone before `die_with_parent` took effect."""
    if os.getppid() != parent_pid:
        os._exit(0)
