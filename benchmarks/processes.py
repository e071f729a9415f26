"""Memory and processor time of a process, from /proc. Shared pages of files do not count as memory."""

import os
from contextlib import suppress
from pathlib import Path


def reset_peak(pid: int) -> None:
    """Restart the measurement of ``peak_bytes``."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(pid: int) -> int:
    """The largest resident set since the process began or ``reset_peak``. Raises OSError if it has ended."""
    return _status_bytes(pid, "VmHWM")


def resident_bytes(pid: int) -> int:
    """The resident set now. Raises OSError if the process has ended."""
    return _status_bytes(pid, "VmRSS")


def cpu_s(pid: int) -> float:
    """Seconds of processor time that a process and all its threads have used. Raises OSError if it has ended."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    # The command name is in brackets and may contain anything.
    user, system = stat.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def cpu_with_children_s(pid: int) -> float:
    """``cpu_s`` of a process and of its present children, such as the sessions of Postgres."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
    used_s = cpu_s(pid)
    for child in children:
        # A session may end meanwhile.
        with suppress(OSError):
            used_s += cpu_s(int(child))
    return used_s


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    # A process that has ended and was not waited for has a status without memory.
    raise ProcessLookupError(f"process {pid} has no {name} any more")
