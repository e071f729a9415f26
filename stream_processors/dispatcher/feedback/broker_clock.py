"""Skew between this process's clock and the broker's, bounded by own heartbeats. Pure.

A heartbeat carries its creation time, the broker appends a timestamp, and it is read back. If the clocks agree, the
timestamp lies between creation and reading, however long either way took: neither a slow broker nor a paused process
looks like clock skew.
"""

from collections import deque
from dataclasses import dataclass, field

_KEPT = 50
"""Heartbeats of ten seconds; the fastest of them gives the tightest bound."""


@dataclass(slots=True)
class BrokerClock:
    """Bounds on how far our clock is ahead of the broker's, from the newest heartbeats."""

    _bounds_ms: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """Lower and upper bound from each heartbeat."""

    def heard(self, made_at_ms: int, appended_at_ms: int, read_at_ms: int) -> None:
        """Add an own heartbeat: creation and reading time by our clock, append time by the broker's."""
        least_ms, most_ms = made_at_ms - appended_at_ms, read_at_ms - appended_at_ms
        if self._bounds_ms and (least_ms > self._most_ms or most_ms < self._least_ms):
            # Contradictory bounds: one of the clocks was set meanwhile.
            self._bounds_ms.clear()
        self._bounds_ms.append((least_ms, most_ms))

    @property
    def skew_ms(self) -> int | None:
        """The proven part of our clock's lead over the broker's, negative when it is behind; 0 if the bounds include 0.
        None before the first heartbeat."""
        if not self._bounds_ms:
            return None
        return max(self._least_ms, 0) + min(self._most_ms, 0)

    def broker_ms(self, now_ms: int) -> int | None:
        """The broker's time at our ``now_ms``, too late by at most the time of one write. None before the first
        heartbeat."""
        # From the lower bound: the upper one contains the reading delay, and a lagging reader's delay is long.
        return now_ms - self._least_ms if self._bounds_ms else None

    @property
    def _least_ms(self) -> int:
        return max(least_ms for least_ms, _ in self._bounds_ms)

    @property
    def _most_ms(self) -> int:
        return min(most_ms for _, most_ms in self._bounds_ms)
