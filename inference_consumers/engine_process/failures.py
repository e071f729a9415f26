"""Causes of failures: an engine's exceptions, and the end of its process. Pure, and without heavy imports.

=================  ==============================================================  ====
kind               what was seen                                                   own
=================  ==============================================================  ====
``crashed``        a signal that a process brings on itself: SIGSEGV, SIGABRT, ...  yes
``exited``         it ended itself, or said that it can run nothing any more       yes
``out_of_memory``  SIGKILL, and the kernel counted a kill for lack of memory       yes
``hung``           no progress, though it was seen to run on a processor           yes
``stopped``        no progress, but it was stopped, waited, or was not watched      no
``lost``           another process that it works with is gone, it knows not why    no
``killed``         any other signal: SIGKILL says nothing of who sent it           no
=================  ==============================================================  ====

An *own* end is the process's own doing, or that of what it ran. Only such an end can be held against an item.
"""

import signal
from dataclasses import dataclass
from enum import StrEnum

from inference_consumers.engines.protocol import EngineGoneError, NoRoomError, Problem, TransientEngineError

# torch's own by name: this process may serve no torch engine, and importing torch takes seconds.
_OUT_OF_MEMORY = frozenset({"MemoryError", "OutOfMemoryError"})
# On the CPU torch raises a plain RuntimeError.
_TORCH_CPU_OUT_OF_MEMORY = "DefaultCPUAllocator: can't allocate memory"
_BROKEN_DEVICE = frozenset({"AcceleratorError", "EngineDeadError"})


def problem_of(error: BaseException) -> Problem:
    """The problem without the exception's text, which may quote a prompt."""
    return Problem(
        type(error).__name__,
        out_of_memory=is_out_of_memory(error),
        transient=isinstance(error, TransientEngineError),
    )


def is_out_of_memory(error: BaseException) -> bool:
    if any(kind.__name__ in _OUT_OF_MEMORY for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and _TORCH_CPU_OUT_OF_MEMORY in str(error)


def lacks_memory(error: BaseException | None) -> bool:
    """Whether a model was not loaded for want of memory."""
    while error is not None:
        if isinstance(error, NoRoomError) or is_out_of_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def is_end_of_engine(error: BaseException) -> bool:
    """Whether the process is unusable from now on: an error of a CUDA kernel invalidates its context."""
    if isinstance(error, EngineGoneError):
        return True
    if is_out_of_memory(error):
        return False
    if any(kind.__name__ in _BROKEN_DEVICE for kind in type(error).__mro__):
        return True
    return isinstance(error, RuntimeError) and str(error).startswith("CUDA error")


def name_of_end(error: BaseException) -> str:
    """The type of what the engine ended by, for ``end_by_error``."""
    cause = error.__cause__ if isinstance(error, EngineGoneError) else None
    return type(cause or error).__name__


class EndKind(StrEnum):
    """See the table above."""

    CRASHED = "crashed"
    EXITED = "exited"
    OUT_OF_MEMORY = "out_of_memory"
    HUNG = "hung"
    STOPPED = "stopped"
    LOST = "lost"
    KILLED = "killed"


_OWN = frozenset({EndKind.CRASHED, EndKind.EXITED, EndKind.OUT_OF_MEMORY, EndKind.HUNG})
# What the kernel or the C library raises in a process for what it did itself.
_CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT, signal.SIGSYS, signal.SIGTRAP}
)
# vLLM's scheduler and its workers are processes below the engine's.
_LOST_ANOTHER = frozenset({"EngineDeadError"})


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """The end of an engine's process; ``reason`` is for logs and replies, and quotes nothing of a request."""

    kind: EndKind
    reason: str

    @property
    def is_own(self) -> bool:
        """Whether what the process ran can be the cause."""
        return self.kind in _OWN


def end_of(status: int, *, kernel_killed: bool) -> EngineEnd:
    """The end by itself of a process with this exit status, negative for a signal as in ``subprocess``.

    ``kernel_killed`` says that the kernel ended a process of the same control group for lack of memory, since this one
    was last given something to run.
    """
    if status >= 0:
        return EngineEnd(EndKind.EXITED, f"exit status {status}")
    by = -status
    name = signal.Signals(by).name if by in set(signal.Signals) else f"signal {by}"
    if by == signal.SIGKILL and kernel_killed:
        return EngineEnd(EndKind.OUT_OF_MEMORY, f"killed by {name}: out of memory")
    return EngineEnd(EndKind.CRASHED if by in _CRASHES else EndKind.KILLED, f"killed by {name}")


def end_by_error(error: str) -> EngineEnd:
    """The end of a process that ended itself, with an error of this type, because it could run nothing any more."""
    return EngineEnd(EndKind.LOST if error in _LOST_ANOTHER else EndKind.EXITED, error)
