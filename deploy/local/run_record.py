"""Record of a running stack: its processes, its lock, and the leftovers of a crashed run.

A process is identified by pid and start time, so that a reused pid is never mistaken for it.
"""

import fcntl
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import BinaryIO

import psutil
from pydantic import TypeAdapter, ValidationError

from deploy.local.layout import AlreadyRunningError, DataDir, StackError
from fairlane_server.private_files import write_private

RUN_ID_VARIABLE = "FAIRLANE_RUN_ID"
"""Set for every process of a run; identifies what a crashed run left behind."""

_KILL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A process. ``start_ticks``: clock ticks from boot to its start (field 22 of /proc/PID/stat); a start time in
    seconds would change when the clock is set."""

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
    """The identity of a running process; None if there is none with this pid or it is a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The command name is in brackets and may contain anything, brackets and spaces too.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else ProcessId(pid, int(fields[19]))


def processes_in(folder: Path) -> set[ProcessId]:
    """Processes whose working directory is ``folder`` (Postgres and its workers live in their data directory)."""
    return _find("cwd", lambda cwd: cwd == str(folder))


def _find(attribute: str, matches: Callable[[object], bool]) -> set[ProcessId]:
    """Other processes with a matching attribute of psutil; an attribute that may not be read is None."""
    pids = [
        process.pid
        for process in psutil.process_iter([attribute])
        if process.pid != os.getpid() and matches(process.info[attribute])
    ]
    return {found for pid in pids if (found := identify(pid))}


class State(StrEnum):
    """State of a process, or of a part that the stack does not run (``EXTERNAL``)."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DONE = "done"
    BACKING_OFF = "backing off"
    STOPPED = "stopped"
    EXTERNAL = "external"


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process of a run.

    Attributes:
        identity: None while it does not run.
        deaths: how often it died without being asked to.
        health_url: of a service with HTTP health.
        ready_after_s: seconds from its last start to ready.
        last_exit: exit status of the instance before this one; negative: the signal that ended it.
    """

    name: str
    state: State
    identity: ProcessId | None = None
    deaths: int = 0
    health_url: str | None = None
    ready_after_s: float | None = None
    last_exit: int | None = None

    @property
    def pid(self) -> int | None:
        return None if self.identity is None else self.identity.pid


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of a stack. ``run_id``: value of FAIRLANE_RUN_ID in the environment of each of its processes."""

    run_id: str
    supervisor: ProcessId
    processes: tuple[ProcessRecord, ...]

    def save(self, file: Path) -> None:
        """Write the record, readable by its owner only."""
        write_private(file, _RUN_RECORD.dump_json(self, indent=2).decode())

    @classmethod
    def load(cls, file: Path) -> "RunRecord | None":
        """The record; None if there is none that can be read (a run that ended cleanly removes it)."""
        try:
            return _RUN_RECORD.validate_json(file.read_bytes())
        except (OSError, ValidationError):
            return None


_RUN_RECORD = TypeAdapter(RunRecord)


def own_identity() -> ProcessId:
    """The identity of this process."""
    identity = identify(os.getpid())
    if identity is None:
        raise StackError("/proc does not show this process: the embedded stack needs Linux with /proc")
    return identity


def acquire_lock(data_dir: DataDir) -> BinaryIO:
    """Exclusive use of a data directory, until the file is closed or the process ends. Raises AlreadyRunningError."""
    file = os.fdopen(os.open(data_dir.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "r+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        record = RunRecord.load(data_dir.processes_file)
        by = f" (supervisor {record.supervisor.pid})" if record is not None else ""
        raise AlreadyRunningError(
            f"a stack is already running in {data_dir.root}{by}: "
            "use it, stop it with `python -m deploy.local down`, or choose another --data-dir"
        ) from None
    return file


def end_leftovers(data_dir: DataDir, folders: Sequence[Path] = ()) -> list[int]:
    """Kill what a crashed run left running; call it with the lock held. Returns the pids it ended.

    ``folders``: no process may live in them (Postgres overwrites its environment, but stays in its data directory).
    Raises StackError: a process does not end.
    """
    found: set[ProcessId] = set()
    record = RunRecord.load(data_dir.processes_file)
    if record is not None:
        found |= {entry.identity for entry in record.processes if entry.identity and entry.identity.is_alive()}
        run_id = record.run_id
        found |= _find("environ", lambda environ: isinstance(environ, dict) and environ.get(RUN_ID_VARIABLE) == run_id)
    for folder in folders:
        found |= processes_in(folder)
    for process in found:
        process.send(signal.SIGKILL)
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    while left := [process for process in found if process.is_alive()]:
        if time.monotonic() >= deadline:
            raise StackError(f"process {left[0].pid} of a crashed run in {data_dir.root} does not end")
        time.sleep(0.01)
    data_dir.processes_file.unlink(missing_ok=True)
    return sorted(process.pid for process in found)


def stop_running(data_dir: DataDir, timeout_s: float) -> bool:
    """Stop the supervisor of a data directory; False if none was running. Raises StackError: not in time."""
    record = RunRecord.load(data_dir.processes_file)
    if record is None:
        return False
    if not record.supervisor.is_alive():
        return bool(end_leftovers(data_dir, (data_dir.postgres / "data",)))
    record.supervisor.send(signal.SIGTERM)
    deadline = time.monotonic() + timeout_s
    while record.supervisor.is_alive():
        if time.monotonic() >= deadline:
            raise StackError(f"the supervisor {record.supervisor.pid} did not stop within {timeout_s:g} s")
        time.sleep(0.05)
    return True
