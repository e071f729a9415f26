"""Specification and running instance of one supervised process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from deploy.local.layout import PROJECT_ROOT
from deploy.local.procfs import ProcessId, identify

CHILD_SCRIPT = Path(__file__).with_name("child.py")

Probe = Callable[[], str | None]
"""Asks a process whether it is ready: None if it is, otherwise why not; must return within a few seconds."""


@dataclass(frozen=True, slots=True)
class RunAs:
    """The user that a process becomes (only Postgres, and only when the supervisor runs as root)."""

    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """What to run and how to tell that it works.

    Attributes:
        name: unique in the stack; also the name of its log.
        argv: the program, by absolute path, and its arguments.
        env: added to the supervisor's own environment.
        without_env: names removed from the supervisor's own environment.
        cwd: its working directory.
        depends_on: names of processes that must be ready (or, one-shot, done) before it starts.
        one_shot: it is expected to end with status 0; any other status stops the stack.
        probe: readiness; without one it is ready as soon as it runs.
        start_timeout_s: how long it may take from start to ready (or, one-shot, done).
        stop_timeout_s: how long it may take to end after the stop signal before SIGKILL.
        stop_signal: what asks it to end.
        death_signal: what the kernel sends it when the supervisor dies.
        run_as: another user to become, or None.
        before_start: called right before every start, in the supervisor's thread; must be quick.
        health_url: what `status` asks, for a service with HTTP health.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    without_env: tuple[str, ...] = ()
    cwd: Path = PROJECT_ROOT
    depends_on: tuple[str, ...] = ()
    one_shot: bool = False
    probe: Probe | None = None
    start_timeout_s: float = 60.0
    stop_timeout_s: float = 15.0
    stop_signal: signal.Signals = signal.SIGTERM
    death_signal: signal.Signals = signal.SIGKILL
    run_as: RunAs | None = None
    before_start: Callable[[], None] | None = None
    health_url: str | None = None


class Instance:
    """A started process. It leads a session of its own, so a Ctrl-C on the terminal reaches the supervisor only."""

    def __init__(self, spec: ProcessSpec, log_file: Path, run_env: Mapping[str, str]) -> None:
        environment = {name: value for name, value in os.environ.items() if name not in spec.without_env}
        user = ("-", "-") if spec.run_as is None else (str(spec.run_as.uid), str(spec.run_as.gid))
        wrapper = (sys.executable, "-I", "-S", str(CHILD_SCRIPT), str(os.getpid()), str(int(spec.death_signal)), *user)
        # Appending, so that the log can be cut short while the process writes it.
        with log_file.open("ab") as log:
            self._popen = subprocess.Popen(
                (*wrapper, "--", *spec.argv),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=spec.cwd,
                env={**environment, **spec.env, **run_env},
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self.identity = identify(self.pid) or ProcessId(self.pid, 0)

    def collect(self) -> int | None:
        """Its exit status once it ended (negative: the signal that ended it), None while it runs.

        What it left in its process group is killed before its pid is given back to the kernel, so
        the group is certainly its own.
        """
        if self._popen.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            self._signal_group(signal.SIGKILL)
        return self._popen.wait()

    def send(self, signum: signal.Signals) -> None:
        """Signal the process itself; nothing happens if it has ended."""
        # Not `Popen.send_signal`, which would collect what has ended and leave its group alive.
        if self._popen.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signum)

    def ask_to_stop(self, signum: signal.Signals) -> None:
        """Send the stop signal, and wake the process in case it was stopped."""
        self.send(signum)
        self.send(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL the process and everything in its group."""
        if self._popen.returncode is None:
            self._signal_group(signal.SIGKILL)

    def _signal_group(self, signum: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signum)


def describe_exit(status: int) -> str:
    """An exit status in words: `exit status 1`, `killed by SIGKILL`."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


Reporter = Callable[[str, str], None]
"""Told what happens: the name of a process and a sentence."""


class State(StrEnum):
    """Where a process stands."""

    WAITING = "waiting"
    STARTING = "starting"
    READY = "ready"
    DONE = "done"
    BACKING_OFF = "backing off"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ProcessView:
    """A process as it was when asked for.

    Attributes:
        name: its name in the stack.
        state: where it stands.
        pid: its process id, or None while it does not run.
        deaths: how often it died without being asked to.
        ready_after_s: seconds from its last start to ready, or None.
        last_exit: the exit status of the instance before this one (negative: the signal that ended it), or None.
    """

    name: str
    state: State
    pid: int | None
    deaths: int
    ready_after_s: float | None
    last_exit: int | None


@dataclass(slots=True)
class Child:
    """A process in the hands of its supervisor; only the supervisor's thread changes it."""

    spec: ProcessSpec
    state: State = State.WAITING
    instance: Instance | None = None
    started_at: float = 0.0
    restart_at: float = 0.0
    next_probe_at: float = 0.0
    recent_deaths: list[float] = field(default_factory=list)
    death_count: int = 0
    answer: "Future[str | None] | None" = None
    why_not_ready: str = "not asked yet"
    ready_after_s: float | None = None
    last_exit: int | None = None
    was_ready: bool = False
    asked_to_restart: bool = False
    stop_deadline: float | None = None

    def settled(self) -> bool:
        """Whether what depends on it may start."""
        return self.state in {State.READY, State.DONE}

    def view(self) -> ProcessView:
        """What others may know of it."""
        return ProcessView(
            name=self.spec.name,
            state=self.state,
            pid=None if self.instance is None else self.instance.pid,
            deaths=self.death_count,
            ready_after_s=self.ready_after_s,
            last_exit=self.last_exit,
        )
