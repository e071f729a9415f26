"""Plan of the consumer processes of one pool on one machine: one for each GPU, or a number of them on the CPU."""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fairlane_server.processes.launcher import worker_environment

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
        """Environment of its process, with its own name and metrics port."""
        made = worker_environment(base, instance_id, metrics_port, self.number)
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
    """Number of GPUs that torch sees. A child process asks: this process needs neither torch nor a device."""
    found = subprocess.run(
        [sys.executable, "-c", _DETECT], capture_output=True, text=True, timeout=_DETECT_TIMEOUT_S, check=False
    )
    if found.returncode != 0:
        raise GpusError("torch cannot be asked for the GPUs: name them with --gpus")
    return int(found.stdout)
