"""Waiting for a condition with a deadline, instead of sleeping and hoping.

A deadline only bounds a hang, so it is generous: a test must not fail because its machine is slow.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable

from fairlane.clock import now_ms

INTERVAL_S = 0.01
PATIENCE_S = 60.0
_MAX_INTERVAL_S = 0.1


def eventually(condition: Callable[[], object], timeout_s: float = PATIENCE_S, what: str = "the condition") -> None:
    """Return as soon as `condition()` is true.

    Raises:
        AssertionError: it is not within `timeout_s`.
    """
    deadline = (asked_s := time.monotonic()) + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        time.sleep(_pause_s(asked_s))
        asked_s = time.monotonic()


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
    deadline = (asked_s := time.monotonic()) + timeout_s
    while not await condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        await asyncio.sleep(_pause_s(asked_s))
        asked_s = time.monotonic()


def until_ms(at_ms: int, timeout_s: float = PATIENCE_S) -> None:
    """Return at a time that somebody was told, milliseconds since the epoch.

    Raises:
        AssertionError: it is not within `timeout_s`.
    """
    eventually(lambda: now_ms() >= at_ms, timeout_s, f"the time {at_ms}")


def _pause_s(asked_s: float) -> float:
    """Seconds until the next look at a condition that was last looked at from ``asked_s`` on.

    Three times as long as the look took: one that asks a server would otherwise take half a core from it.
    """
    return min(_MAX_INTERVAL_S, max(INTERVAL_S, 3 * (time.monotonic() - asked_s)))
