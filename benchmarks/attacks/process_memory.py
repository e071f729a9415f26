"""How much memory a process takes, as the kernel counts it; the page cache does not count."""

from pathlib import Path


def reset_peak(pid: int) -> None:
    """Count the peak from now on."""
    Path(f"/proc/{pid}/clear_refs").write_text("5", encoding="ascii")


def peak_bytes(pid: int) -> int:
    """The largest resident set since the process began or ``reset_peak``. Raises OSError if it is gone."""
    return _status_bytes(pid, "VmHWM")


def resident_bytes(pid: int) -> int:
    """The resident set now. Raises OSError if the process is gone."""
    return _status_bytes(pid, "VmRSS")


def _status_bytes(pid: int, name: str) -> int:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ProcessLookupError(f"process {pid} has no {name} any more")
