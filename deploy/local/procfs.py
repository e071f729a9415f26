"""Processes from /proc, identified by pid and start time, so that a reused pid is never mistaken."""

import os
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process, identified over pid reuse.

    Attributes:
        pid: the process id.
        start_ticks: clock ticks from boot to its start (field 22 of /proc/PID/stat).
    """

    pid: int
    start_ticks: int

    def is_alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        return identify(self.pid) == self

    def send(self, signum: signal.Signals) -> None:
        """Signal it if it is still the same process."""
        if self.is_alive():
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process, or None if there is none with this pid or it is a zombie."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command name is in brackets and may contain anything, brackets and spaces too.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def find_by_environment(name: str, value: str) -> Iterator[ProcessId]:
    """Every process, whoever is its parent now, that was started with `name=value` in its environment."""
    wanted = f"{name}={value}".encode()
    for pid in _pids():
        try:
            environment = (PROC / str(pid) / "environ").read_bytes()
        except OSError:
            continue
        if wanted in environment.split(b"\0") and (found := identify(pid)):
            yield found


def find_by_folder(folder: Path) -> Iterator[ProcessId]:
    """Every process whose working directory is `folder` (Postgres and its workers live in their data directory)."""
    for pid in _pids():
        try:
            at = (PROC / str(pid) / "cwd").readlink()
        except OSError:
            continue
        if at == folder and (found := identify(pid)):
            yield found


def find_by_parent(parent: int) -> Iterator[ProcessId]:
    """Every running child of a process."""
    for pid in _pids():
        try:
            stat = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if int(stat.rpartition(")")[2].split()[1]) == parent and (found := identify(pid)):
            yield found


def command_of(process: ProcessId) -> tuple[str, ...]:
    """Its command line; empty for one that has ended."""
    try:
        raw = (PROC / str(process.pid) / "cmdline").read_bytes()
    except OSError:
        return ()
    return tuple(part.decode(errors="replace") for part in raw.split(b"\0")) if process.is_alive() else ()


def end(processes: Iterable[ProcessId], timeout_s: float = 10.0) -> list[ProcessId]:
    """SIGKILL the processes and wait until they are gone; returns those that would not go in time."""
    left = list(processes)
    for process in left:
        process.send(signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while (left := [process for process in left if process.is_alive()]) and time.monotonic() < deadline:
        time.sleep(0.01)
    return left


def _pids() -> Iterator[int]:
    own = os.getpid()
    for entry in PROC.iterdir():
        if entry.name.isdecimal() and int(entry.name) != own:
            yield int(entry.name)
