"""Wait for a condition, up to a deadline."""

from collections.abc import Callable
from time import monotonic, sleep

_INTERVAL_S = 0.02


def wait_until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    """Return as soon as ``condition()`` is true. Raises TimeoutError when it is not within ``timeout_s``."""
    wait_while(lambda: None if condition() else "", timeout_s, what)


def wait_while(problem: Callable[[], str | None], timeout_s: float, what: str) -> None:
    """Return as soon as there is no problem. Raises TimeoutError, with the last one, after ``timeout_s``."""
    deadline = monotonic() + timeout_s
    while (found := problem()) is not None:
        if monotonic() > deadline:
            raise TimeoutError(f"{what} did not come about within {timeout_s:g} s{found and f': {found}'}")
        sleep(_INTERVAL_S)
