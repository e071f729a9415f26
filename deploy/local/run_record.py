"""Record of a running stack: its processes, its lock, and the leftovers of a crashed run."""

import fcntl
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from deploy.local import procfs
from deploy.local.layout import AlreadyRunningError, DataDir, StackError, write_private
from deploy.local.procfs import ProcessId

RUN_ID_VARIABLE = "FAIRLANE_RUN_ID"
"""Set for every process of a run, so that what a crashed run left behind can be told from everything else."""


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process of a run.

    Attributes:
        name: its name in the stack.
        state: where it stands (`deploy.local.supervisor.State`).
        identity: its pid and start time, or None while it does not run.
        deaths: how often it died without being asked to.
        health_url: where to ask for its health, if it has HTTP health.
    """

    name: str
    state: str
    identity: ProcessId | None
    deaths: int
    health_url: str | None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of a stack.

    Attributes:
        run_id: value of FAIRLANE_RUN_ID in the environment of every process of the run.
        supervisor: the process that supervises the run.
        processes: the others.
    """

    run_id: str
    supervisor: ProcessId
    processes: tuple[ProcessRecord, ...]

    def save(self, file: Path) -> None:
        """Write the record, readable by its owner only."""
        write_private(file, json.dumps(asdict(self), indent=2))

    @classmethod
    def load(cls, file: Path) -> "RunRecord | None":
        """The record, or None if there is none that can be read (a run that ended cleanly removes it)."""
        try:
            raw = json.loads(file.read_text(encoding="utf-8"))
            return cls(
                run_id=raw["run_id"],
                supervisor=ProcessId(**raw["supervisor"]),
                processes=tuple(
                    ProcessRecord(**{**entry, "identity": entry["identity"] and ProcessId(**entry["identity"])})
                    for entry in raw["processes"]
                ),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None


def own_identity() -> ProcessId:
    """The identity of this process."""
    identity = procfs.identify(os.getpid())
    if identity is None:
        raise StackError("/proc does not show this process: the embedded stack needs Linux with /proc")
    return identity


class RunLock:
    """Exclusive use of a data directory, for as long as this object holds it or its process lives."""

    def __init__(self, data_dir: DataDir) -> None:
        self._data_dir = data_dir
        self._descriptor: int | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            AlreadyRunningError: another supervisor has it.
        """
        descriptor = os.open(self._data_dir.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            record = RunRecord.load(self._data_dir.processes_file)
            by = f" (supervisor {record.supervisor.pid})" if record is not None else ""
            raise AlreadyRunningError(
                f"a stack is already running in {self._data_dir.root}{by}: "
                "use it, stop it with `python -m deploy.local down`, or choose another --data-dir"
            ) from None
        self._descriptor = descriptor

    def release(self) -> None:
        """Give the lock back; nothing happens if it is not held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def end_leftovers(data_dir: DataDir, folders: Sequence[Path] = ()) -> list[int]:
    """Kill what a crashed run left running; call it with the lock held. Returns the pids it ended.

    Args:
        data_dir: the data directory whose last run is looked for.
        folders: data folders in which no process may live any more (Postgres overwrites its environment, but
            stays in its data directory).

    Raises:
        StackError: a process does not go.
    """
    found: set[ProcessId] = set()
    record = RunRecord.load(data_dir.processes_file)
    if record is not None:
        found |= {entry.identity for entry in record.processes if entry.identity and entry.identity.is_alive()}
        found |= set(procfs.find_by_environment(RUN_ID_VARIABLE, record.run_id))
    for folder in folders:
        found |= set(procfs.find_by_folder(folder))
    left = procfs.end(found)
    if left:
        raise StackError(f"process {left[0].pid} of a crashed run in {data_dir.root} does not end")
    data_dir.processes_file.unlink(missing_ok=True)
    return sorted(process.pid for process in found)


def stop_running(data_dir: DataDir, timeout_s: float) -> bool:
    """Ask the supervisor of a data directory to stop, and wait until it has; False if none was running.

    Raises:
        StackError: it did not stop in time.
    """
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
