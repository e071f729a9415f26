"""Memory and processor time of a process, from /proc. Shared pages of files do not count as memory."""

import os
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


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    # A process that has ended and was not waited for has a status without memory.
    raise ProcessLookupError(f"process {pid} has no {name} any more")
