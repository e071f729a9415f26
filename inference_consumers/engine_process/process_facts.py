"""Facts about processes from the kernel; None where they cannot be read. Nothing here raises."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

_PROC = Path("/proc")
_CGROUP = Path("/sys/fs/cgroup")
_STOPPED = ("T", "t")
"""By a signal, and by a debugger (proc(5), the state in /proc/PID/stat)."""

# Places in /proc/PID/stat after the name of the program: the state is the first of these.
_USER_TICKS, _KERNEL_TICKS = 11, 12
_TICK_MS = 1_000 / os.sysconf("SC_CLK_TCK")


def is_stopped(pid: int, proc: Path = _PROC) -> bool:
    """Whether a process, or one of its children, is stopped by a signal."""
    return any(stat[:1] and stat[0] in _STOPPED for stat in _stats(pid, proc))


def cpu_ms(pid: int, proc: Path = _PROC) -> int | None:
    """CPU time in ms of a process and its descendants; None when there is no such process. It falls when a descendant
    ends."""
    ticks = [
        int(stat[_USER_TICKS]) + int(stat[_KERNEL_TICKS]) for stat in _stats(pid, proc) if len(stat) > _KERNEL_TICKS
    ]
    return round(sum(ticks) * _TICK_MS) if ticks else None


def held_bytes(pid: int, proc: Path = _PROC) -> int:
    """Main memory of a process and its descendants: pages that n processes share count for a nth of each (PSS). 0 when
    there is no such process."""
    return sum(map(_resident_bytes, _family(pid, proc)))


def main_memory_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes that this process may still allocate: the machine's, or its container's if less."""
    free = int(psutil.virtual_memory().available)
    try:
        limit = (cgroup / "memory.max").read_text().strip()
        used = int((cgroup / "memory.current").read_text())
        cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return free
    if limit == "max":
        return free
    # The kernel gives up cached files before it ends a process.
    return max(0, min(free, int(limit) - used + int(cached.get("inactive_file", 0))))


def _resident_bytes(folder: Path) -> int:
    for line in _text(folder / "smaps_rollup").splitlines():
        name, _, size = line.partition(":")
        if name == "Pss":
            return int(size.split()[0]) * 1024
    # Of a process that may not be looked into only the whole is known, shared pages included.
    sizes = _text(folder / "statm").split()
    return int(sizes[1]) * os.sysconf("SC_PAGE_SIZE") if len(sizes) > 1 else 0


def _stats(pid: int, proc: Path) -> Iterator[list[str]]:
    """The fields of /proc/PID/stat after the program's name, of a process and each of its descendants."""
    for folder in _family(pid, proc):
        # The name is in parentheses, and may hold any character.
        yield _text(folder / "stat").rpartition(")")[2].split()


def _family(pid: int, proc: Path) -> Iterator[Path]:
    """The folders of a process and its descendants below /proc."""
    waiting = [str(pid)]
    while waiting:
        folder = proc / waiting.pop()
        yield folder
        with contextlib.suppress(OSError):
            for children in folder.glob("task/*/children"):
                waiting += _text(children).split()


class OomKills:
    """Processes of this control group that the kernel has killed for lack of memory."""

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        self._file = next((file for file in _counters(proc, cgroups) if oom_kills(_text(file)) is not None), None)

    def count(self) -> int | None:
        return None if self._file is None else oom_kills(_text(self._file))


def _counters(proc: Path, cgroups: Path) -> list[Path]:
    """Possible locations of the counter. In a container the group's folder is often the root of the visible tree."""
    files = []
    for line in _text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            files += [cgroups / path.lstrip("/") / "memory.events", cgroups / "memory.events"]
        elif "memory" in controllers.split(","):
            memory = cgroups / "memory"
            files += [memory / path.lstrip("/") / "memory.oom_control", memory / "memory.oom_control"]
    return files


def oom_kills(counters: str) -> int | None:
    """The kernel's count in a control group's ``memory.events`` (version 2) or ``memory.oom_control`` (version 1)."""
    for line in counters.splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill" and count.strip().isdecimal():
            return int(count)
    return None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
