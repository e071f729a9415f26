"""The broker's clock beside our own, as far as our own heartbeats tell. Pure.

A heartbeat names the moment it was made, the broker stamps it, and it is read back: by a clock that agrees, the stamp
lies between the two. That holds however long either way took, so neither a slow broker nor a paused process is ever
taken for a clock that is wrong.
"""

from collections import deque
from dataclasses import dataclass, field

_KEPT = 50
"""Heartbeats of ten seconds: the quickest of them bounds best."""


@dataclass(slots=True)
class LogClock:
    """By how much our clock is ahead of the broker's; the newest heartbeats count."""

    _bounds_ms: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=_KEPT))
    """By each heartbeat, what it is at least and at most."""

    def heard(self, made_at_ms: int, appended_at_ms: int, read_at_ms: int) -> None:
        """An own heartbeat came back: made and read by our clock, appended by the broker's."""
        least_ms, most_ms = made_at_ms - appended_at_ms, read_at_ms - appended_at_ms
        if self._bounds_ms and (least_ms > self._most_ms or most_ms < self._least_ms):
            # One of the clocks was set since.
            self._bounds_ms.clear()
        self._bounds_ms.append((least_ms, most_ms))

    @property
    def skew_ms(self) -> int | None:
        """What our clock is ahead of the broker's by, for certain; negative when it is behind. None before the first
        heartbeat."""
        if not self._bounds_ms:
            return None
        return max(self._least_ms, 0) + min(self._most_ms, 0)

    def broker_ms(self, now_ms: int) -> int | None:
        """What the broker's clock shows at ``now_ms`` by ours, or up to the time of one write more. None before the
        first heartbeat."""
        # Not from the upper bound: whoever lags reads late, and nobody writes that late.
        return now_ms - self._least_ms if self._bounds_ms else None

    @property
    def _least_ms(self) -> int:
        return max(least_ms for least_ms, _ in self._bounds_ms)

    @property
    def _most_ms(self) -> int:
        return min(most_ms for _, most_ms in self._bounds_ms)
