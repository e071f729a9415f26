"""Waiting for a condition with a deadline, instead of sleeping and hoping.

A deadline only bounds a hang, so it is generous: a test must not fail because its machine is slow.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from fairlane.clock import now_ms

INTERVAL_S = 0.01
PATIENCE_S = 60.0


def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "the condition") -> None:
    """Return as soon as `condition()` is true.

    Raises:
        AssertionError: it is not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        time.sleep(INTERVAL_S)


async def eventually_async(
    condition: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "the condition"
) -> None:
    """The same within an event loop."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        await asyncio.sleep(INTERVAL_S)


async def eventually_awaited(
    condition: Callable[[], Awaitable[object]], timeout_s: float = PATIENCE_S, what: str = "the condition"
) -> None:
    """The same, of a condition that is asked for."""
    deadline = time.monotonic() + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        await asyncio.sleep(INTERVAL_S)


def until_ms(at_ms: int, timeout_s: float = PATIENCE_S) -> None:
    """Return at a time that somebody was told, milliseconds since the epoch.

    Raises:
        AssertionError: it is not within `timeout_s`.
    """
    eventually(lambda: now_ms() >= at_ms, timeout_s, f"the time {at_ms}")
