"""Processes that must not outlive their parent."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however that happens. Linux only; elsewhere a no-op.

    Call it first thing in the child, or between fork and exec: it survives exec. "Parent" is the thread that made the
    process, so that thread must live as long as the child is to.
    """
    if _LIBC is None:
        return
    parent = os.getppid()
    if _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    # The parent may have died before the request was in place.
    if os.getppid() != parent:
        os._exit(0)
