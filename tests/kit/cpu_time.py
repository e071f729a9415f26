"""Processor time of a block of a test: what a busy machine, other threads and the garbage collector do not lengthen."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import thread_time


@dataclass(slots=True)
class CpuTime:
    """``spent_s`` is known once the block has ended."""

    spent_s: float = 0.0


@contextmanager
def cpu_time() -> Iterator[CpuTime]:
    """Measure the seconds of processor time that this thread spends in the block."""
    time = CpuTime()
    # A collection looks at every object of the test process, which may hold torch: up to a second.
    was_enabled = gc.isenabled()
    gc.disable()
    began_s = thread_time()
    try:
        yield time
    finally:
        time.spent_s = thread_time() - began_s
        if was_enabled:
            gc.enable()
