"""Waiting for a condition with a deadline, instead of sleeping and hoping."""

import time
from collections.abc import Callable

INTERVAL_S = 0.01


def eventually(condition: Callable[[], object], timeout_s: float = 10.0, what: str = "the condition") -> None:
    """Return as soon as `condition()` is true.

    Raises:
        AssertionError: it is not within `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about within {timeout_s:g} s"
        time.sleep(INTERVAL_S)
