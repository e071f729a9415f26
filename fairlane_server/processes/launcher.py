"""Worker processes of one service on one machine: started again when they die, ended together."""

import os
import random
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from fairlane.logs import get_logger
from fairlane_server.processes.parent import die_with_parent
from fairlane_server.processes.restarts import RestartPolicy
from fairlane_server.processes.service import StopSignal

log = get_logger(__name__)

_LAUNCHER_VARIABLE = "FAIRLANE_LAUNCHER_PID"
_LOOK_EVERY_S = 0.1
_END_MARGIN_S = 10.0


def worker_environment(base: Mapping[str, str], instance_id: str, metrics_port: int, number: int) -> dict[str, str]:
    """Environment of a worker, with its own name and metrics port; a port of 0 stays free."""
    port = metrics_port + number if metrics_port else 0
    return {**base, "INSTANCE_ID": f"{instance_id}-{number}", "METRICS_PORT": str(port)}


def end_with_launcher() -> bool:
    """In a worker: have SIGTERM sent to this process when its launcher ends. Returns whether this is a worker."""
    launcher_pid = os.environ.pop(_LAUNCHER_VARIABLE, None)
    if launcher_pid is None:
        return False
    die_with_parent(signal.SIGTERM, int(launcher_pid))
    return True


@dataclass(slots=True)
class _Slot:
    number: int
    environment: Mapping[str, str]
    process: "subprocess.Popen[bytes] | None" = None
    deaths: list[float] = field(default_factory=list)
    start_at: float = 0.0


@dataclass(slots=True)
class Launcher:
    """Runs workers until SIGTERM, or until one of them dies too often. Main thread only: the kernel ends the workers
    with the thread that started them.

    Attributes:
        command: starts a worker, which calls ``end_with_launcher``.
        environments: of the workers.
        drain_timeout_s: how long the workers may take to end.
        inherited: open file descriptors that the workers get.
        on_end: called before the workers are asked to end.
    """

    command: Sequence[str]
    environments: Sequence[Mapping[str, str]]
    drain_timeout_s: float
    inherited: Sequence[int] = ()
    on_end: Callable[[], None] | None = None
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    _stop: StopSignal = field(default_factory=StopSignal)

    def run(self) -> int:
        """Returns the exit status: 0 when all ended well after a signal, 1 when one was given up or did not end."""
        self._stop.install()
        slots = [_Slot(number, environment) for number, environment in enumerate(self.environments)]
        reason = None
        while reason is None and not self._stop.stopping:
            for slot in slots:
                reason = reason or self._look_after(slot, monotonic())
            self._stop.wait(_LOOK_EVERY_S)
        if reason is not None:
            log.error("launcher_gave_up", reason=reason)
        if self.on_end is not None:
            self.on_end()
        status = self._end_all([slot.process for slot in slots if slot.process is not None])
        return status if reason is None else status or 1

    def _look_after(self, slot: _Slot, now: float) -> str | None:
        """Start it, or start it again. Returns why it is given up, if it is."""
        if slot.process is None:
            if now >= slot.start_at:
                environment = {**slot.environment, _LAUNCHER_VARIABLE: str(os.getpid())}
                # A group of its own: Ctrl-C in a terminal goes to the launcher alone, which passes it on once.
                slot.process = subprocess.Popen(self.command, env=environment, pass_fds=self.inherited, process_group=0)
                log.info("worker_started", worker=slot.number, pid=slot.process.pid)
            return None
        status = slot.process.poll()
        if status is None:
            return None
        slot.process = None
        slot.deaths = self.policy.within_window([*slot.deaths, now], now)
        decision = self.policy.decide(slot.deaths, now, random.random(), status)  # noqa: S311 - jitter
        if isinstance(decision, str):
            return f"worker {slot.number} {decision}, the last time with status {status}"
        log.error("worker_died", worker=slot.number, status=status, restart_after_s=round(decision, 2))
        slot.start_at = now + decision
        return None

    def _end_all(self, running: Sequence["subprocess.Popen[bytes]"]) -> int:
        """SIGTERM to all at once; each drains. Returns 1 when one did not end well."""
        for process in running:
            process.send_signal(signal.SIGTERM)
        deadline = monotonic() + self.drain_timeout_s + _END_MARGIN_S
        worst = 0
        for process in running:
            try:
                status = process.wait(max(0.1, deadline - monotonic()))
                # One that had just been started dies of the signal: it has nothing to drain yet.
                worst = max(worst, int(status not in (0, -signal.SIGTERM)))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                worst = 1
        return worst
