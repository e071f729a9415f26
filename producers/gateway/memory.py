"""Giving memory back to the system after a peak of bodies.

CPython and glibc keep what was freed for the next allocation. Blocks as large as bodies are mapped one by one here, so
that they go back when they are freed; what was broken into smaller ones goes back at a quiet moment after a peak.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

from fairlane import metrics

_M_MMAP_THRESHOLD: Final = -3
_MAPPED_BYTES: Final = 131_072
"""glibc's own first value. Set, it stays; else a freed block of up to 32 MiB raises it, and the next one that large
comes from the heap, whose top is rarely free."""


@dataclass(slots=True)
class TrimWatch:
    """Says when a peak is over. Pure.

    Args:
        peak_bytes: held at once, from where on freed memory is worth a trim, which stops every thread's allocations for
            some milliseconds.
    """

    peak_bytes: int = 16 * 1024 * 1024
    _most_bytes: int = 0

    def is_due(self, held_bytes: int) -> bool:
        """Whether to trim now, with so much held; to be asked now and then."""
        self._most_bytes = max(self._most_bytes, held_bytes)
        if self._most_bytes < self.peak_bytes or held_bytes > self._most_bytes // 4:
            return False
        self._most_bytes = 0
        return True


def map_large_blocks() -> None:
    """Have large blocks mapped one by one, where the C library is glibc. Before the first of them is made."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def trim() -> None:
    """Give free memory back, where the C library is glibc. Blocks: to be called on a thread of its own."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
        metrics.GATEWAY_MEMORY_TRIMS.inc()
