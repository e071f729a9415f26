"""How much memory a process took at its peak, as the kernel counts it."""

from pathlib import Path


def reset_peak(pid: int) -> None:
    """Count the peak from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_mib(pid: int) -> int:
    """The largest resident set since the process began or ``reset_peak``."""
    return _status_mib(pid, "VmHWM")


def resident_mib(pid: int) -> int:
    """The resident set now."""
    return _status_mib(pid, "VmRSS")


def _status_mib(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) // 1024
    raise LookupError(f"{name} of process {pid}")
