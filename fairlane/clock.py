"""Clocks that are passed as arguments, so that tests can replace them."""

import time
from collections.abc import Callable

ClockMs = Callable[[], int]
"""Returns milliseconds: ``now_ms`` since the epoch, ``monotonic_ms`` since an arbitrary moment."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Never goes back, even when the system clock is set."""
    return time.monotonic_ns() // 1_000_000
