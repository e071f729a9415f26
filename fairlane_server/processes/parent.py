"""A process whose life is tied to the one that started it."""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(number: signal.Signals, parent_pid: int | None = None) -> None:
    """Have the kernel send this process a signal when the thread that started it ends. Only Linux can.

    ``parent_pid`` is who that was: if it is gone already the signal comes at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if parent_pid is not None and os.getppid() != parent_pid:
        os.kill(os.getpid(), number)
