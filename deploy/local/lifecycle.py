"""States of a supervised process."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum

from deploy.local.process import Instance, ProcessSpec

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
