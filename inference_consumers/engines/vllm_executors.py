"""Executors that vLLM runs in its engine core process: they end with the process that started them, which vLLM's own do
not.

vLLM is imported here at once: only that process and ``vllm_client`` import this.
"""

import multiprocessing
import signal

from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from fairlane_server.processes.parent import die_with_parent


class _TiedUniProcExecutor(UniProcExecutor):  # type: ignore[misc] # vLLM is not installed where types are checked
    """vLLM's executor of one worker inside the engine core."""

    def _init_executor(self) -> None:
        _die_with_engine()
        super()._init_executor()


class _TiedMultiprocExecutor(MultiprocExecutor):  # type: ignore[misc] # as above
    """vLLM's executor of several worker processes, which end with the engine core."""

    def _init_executor(self) -> None:
        _die_with_engine()
        super()._init_executor()


def tied(executor: type[Executor]) -> type[Executor]:
    """The executor that vLLM chose, tied to the life of this process."""
    return {UniProcExecutor: _TiedUniProcExecutor, MultiprocExecutor: _TiedMultiprocExecutor}[executor]


def _die_with_engine() -> None:
    parent = multiprocessing.parent_process()
    die_with_parent(signal.SIGKILL, parent.pid if parent is not None else None)
