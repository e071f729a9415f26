"""Return memory to the system after a peak of request bodies.

CPython and glibc keep freed memory for later allocations. Blocks as large as bodies are mapped individually here, so
that freeing one returns it; memory split into smaller blocks is returned by a trim at a quiet moment after a peak.
"""

import ctypes
from dataclasses import dataclass
from typing import Final

from fairlane import metrics

_M_MMAP_THRESHOLD: Final = -3
_MAPPED_BYTES: Final = 131_072
"""glibc's initial value. Setting it disables glibc's adjustment: otherwise freeing a block of up to 32 MiB raises it,
and the next block of that size comes from the heap, whose top is rarely free."""


@dataclass(slots=True)
class TrimWatch:
    """Detects the end of a peak. Pure.

    Args:
        peak_bytes: bytes held at once that make a trim worthwhile: it stops every thread's allocations for some
            milliseconds.
    """

    peak_bytes: int = 16 * 1024 * 1024
    _most_bytes: int = 0

    def is_due(self, held_bytes: int) -> bool:
        """Whether to trim now, with ``held_bytes`` held. Call periodically."""
        self._most_bytes = max(self._most_bytes, held_bytes)
        if self._most_bytes < self.peak_bytes or held_bytes > self._most_bytes // 4:
            return False
        self._most_bytes = 0
        return True


def map_large_blocks() -> None:
    """Map large blocks individually, if the C library is glibc. Call before the first large allocation."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


def trim() -> None:
    """Return free memory to the system, if the C library is glibc. Blocks: call it off the event loop."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)
        metrics.GATEWAY_MEMORY_TRIMS.inc()
