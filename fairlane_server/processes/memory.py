"""A bound on the memory of a process, kept by the kernel. Linux only."""

import os
import resource
from pathlib import Path

_DATA_PAGES = 5
"""Place in /proc/self/statm (proc(5)): private writable memory and the stack."""


def bound_growth(most_bytes: int) -> None:
    """Bound this process's own memory to what it has now and so much more: an allocation beyond that fails. Mapped
    files, such as the weights of a model, do not count (setrlimit(2), RLIMIT_DATA)."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[_DATA_PAGES])
    limit_bytes = pages * os.sysconf("SC_PAGE_SIZE") + most_bytes
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
