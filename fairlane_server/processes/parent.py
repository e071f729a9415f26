"""Tie the life of a process to its parent's. Linux only."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals, parent_pid: int | None = None) -> None:
    """Have the kernel signal this process when the thread that started it ends. No effect outside Linux.

    ``parent_pid`` is the expected parent: if it is already gone, the signal comes at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), number)
