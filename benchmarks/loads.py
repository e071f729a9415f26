"""Loads of ``cost`` and ``stack-rate``: one request after another, 32 callers, and an open loop."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any, Protocol

CALLERS = 32
_TIMEOUT_S = 120.0


class Pending(Protocol):
    """A request that was sent."""

    def result(self, timeout: float) -> Any:
        """Wait for its answer, at most so many seconds."""


Submit = Callable[[], Pending]


def one_at_a_time(submit: Submit, requests: int) -> list[float]:
    """Latencies in ms of one caller that waits for each answer."""
    latencies_ms = []
    for _ in range(requests):
        started = perf_counter()
        submit().result(_TIMEOUT_S)
        latencies_ms.append((perf_counter() - started) * 1e3)
    return latencies_ms


def from_callers(submit: Submit, requests: int) -> list[float]:
    """Latencies in ms of ``CALLERS`` callers, each of which waits for each answer."""
    with ThreadPoolExecutor(CALLERS) as callers:
        parts = callers.map(lambda _: one_at_a_time(submit, requests // CALLERS), range(CALLERS))
        return [latency_ms for part in parts for latency_ms in part]


def open_loop(sent: Iterable[Pending]) -> None:
    """Send all without waiting for an answer, then wait for all answers."""
    for pending in list(sent):
        pending.result(_TIMEOUT_S)
