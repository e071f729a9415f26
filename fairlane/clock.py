"""Time as a parameter: tests replace it."""

import time
from collections.abc import Callable

ClockMs = Callable[[], int]
"""Milliseconds since the epoch."""


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def monotonic_ms() -> int:
    """Since any moment; never goes back, whatever is done to the machine's clock."""
    return time.monotonic_ns() // 1_000_000
