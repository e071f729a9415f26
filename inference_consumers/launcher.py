"""Several consumers of one pool on one machine: one process for each GPU, or so many on the CPU, started again when
they die."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic

from fairlane.logs import get_logger
from fairlane_server.processes.restarts import RestartPolicy
from fairlane_server.processes.service import StopSignal

log = get_logger(__name__)

_LOOK_EVERY_S = 0.1
_END_MARGIN_S = 10.0
_DETECT = "import torch; print(torch.cuda.device_count())"
_DETECT_TIMEOUT_S = 120.0


class GpusError(Exception):
    """The GPUs asked for cannot be used; says why."""


@dataclass(frozen=True, slots=True)
class Worker:
    """One consumer process: the number of its slot, the GPUs it sees, and how many threads it has on a CPU; None leaves
    them as they are."""

    number: int
    devices: tuple[str, ...] = ()
    threads: int | None = None

    def environment(self, base: Mapping[str, str], instance_id: str, metrics_port: int) -> dict[str, str]:
        """Of its process. Each has its own name and its own port; a port of 0 stays free."""
        made = {**base, "INSTANCE_ID": f"{instance_id}-{self.number}"}
        made["METRICS_PORT"] = str(metrics_port + self.number if metrics_port else 0)
        # Without any it must see none: the engine takes a GPU where there is one.
        made["CUDA_VISIBLE_DEVICES"] = ",".join(self.devices)
        if self.threads is not None:
            made["ENGINE_THREADS"] = str(self.threads)
        return made


def gpus_to_use(asked: str, visible: str | None, detect: Callable[[], int]) -> tuple[str, ...]:
    """The devices behind ``--gpus``: ``none``, ``auto``, or names with commas between them.

    ``visible`` is CUDA_VISIBLE_DEVICES, which bounds what ``auto`` takes. Raises GpusError.
    """
    if asked == "none":
        return ()
    if asked == "auto":
        if visible is not None:
            return tuple(filter(None, visible.split(","))) if detect() else ()
        return tuple(str(number) for number in range(detect()))
    named = tuple(name.strip() for name in asked.split(","))
    if not all(named):
        raise GpusError(f"--gpus {asked}: a name is empty; write auto, none, or names like 0,1")
    if len(set(named)) != len(named):
        raise GpusError(f"--gpus {asked}: a GPU is named twice")
    return named


def plan_workers(gpus: Sequence[str], gpus_each: int, workers: int, cores: int | None = None) -> list[Worker]:
    """One worker for each ``gpus_each`` GPUs; without GPUs so many on the CPU, which share its ``cores`` if they are
    given. Raises GpusError when some GPUs are left."""
    if not gpus:
        return [Worker(number, threads=cores and max(1, cores // workers)) for number in range(workers)]
    if len(gpus) % gpus_each:
        raise GpusError(f"{len(gpus)} GPUs cannot be shared out by {gpus_each}, the pool's tensor_parallel_size")
    sets = [tuple(gpus[first : first + gpus_each]) for first in range(0, len(gpus), gpus_each)]
    return [Worker(number, devices) for number, devices in enumerate(sets)]


def detect_gpus() -> int:
    """How many GPUs torch sees. In a process of its own: this one needs neither torch nor a device."""
    found = subprocess.run(
        [sys.executable, "-c", _DETECT], capture_output=True, text=True, timeout=_DETECT_TIMEOUT_S, check=False
    )
    if found.returncode != 0:
        raise GpusError("torch cannot be asked for the GPUs: name them with --gpus")
    return int(found.stdout)


@dataclass(slots=True)
class _Slot:
    worker: Worker
    process: "subprocess.Popen[bytes] | None" = None
    deaths: list[float] = field(default_factory=list)
    start_at: float = 0.0


@dataclass(slots=True)
class Launcher:
    """Runs workers until SIGTERM, or until one of them dies too often. Main thread only: the kernel ends the workers
    with the thread that started them."""

    command: Sequence[str]
    """Starts a worker, with ``--parent-pid`` and this process's id added."""
    workers: Sequence[Worker]
    environment: Callable[[Worker], Mapping[str, str]]
    drain_timeout_s: float
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    _stop: StopSignal = field(default_factory=StopSignal)

    def run(self) -> int:
        """Returns the exit status: 0 when all ended well after a signal, 1 when one was given up or did not end."""
        self._stop.install()
        slots = [_Slot(worker) for worker in self.workers]
        reason = None
        while reason is None and not self._stop.stopping:
            for slot in slots:
                reason = reason or self._look_after(slot, monotonic())
            self._stop.wait(_LOOK_EVERY_S)
        if reason is not None:
            log.error("launcher_gave_up", reason=reason)
        status = self._end_all([slot.process for slot in slots if slot.process is not None])
        return status if reason is None else status or 1

    def _look_after(self, slot: _Slot, now: float) -> str | None:
        """Start it, or start it again. Returns why it is given up, if it is."""
        if slot.process is None:
            if now >= slot.start_at:
                command = [*self.command, "--parent-pid", str(os.getpid())]
                slot.process = subprocess.Popen(command, env=self.environment(slot.worker))
                log.info("worker_started", worker=slot.worker.number, pid=slot.process.pid, gpus=slot.worker.devices)
            return None
        status = slot.process.poll()
        if status is None:
            return None
        slot.process = None
        slot.deaths = self.policy.within_window([*slot.deaths, now], now)
        decision = self.policy.decide(slot.deaths, now, random.random(), status)  # noqa: S311 - jitter
        if isinstance(decision, str):
            return f"worker {slot.worker.number} {decision}, the last time with status {status}"
        log.error("worker_died", worker=slot.worker.number, status=status, restart_after_s=round(decision, 2))
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
