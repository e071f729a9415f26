"""Rate-limited logging of repeated failures."""

from collections import Counter
from typing import Any

from fairlane.clock import ClockMs, monotonic_ms
from producers.gateway.limits.rate_buckets import RatePolicy, TokenBuckets

_LINES = RatePolicy(rate_per_s=0.2, burst=3)
_MOST_EVENTS = 64


class LimitedLog:
    """Logs three lines of an event, then one every five seconds with the number suppressed since. Not thread-safe.

    Args:
        log: logger of the lines.
        clock: monotonic milliseconds.
    """

    def __init__(self, log: Any, clock: ClockMs = monotonic_ms) -> None:
        self._log = log
        self._clock = clock
        self._book = TokenBuckets(_MOST_EVENTS)
        self._unsaid: Counter[str] = Counter()

    def warning(self, event: str, **fields: object) -> None:
        """Log a warning unless its event is over the rate. ``event`` must be a literal, so that there are few."""
        if self._book.take([event], _LINES, self._clock()).is_granted:
            self._log.warning(event, not_logged_before=self._unsaid.pop(event, 0), **fields)
        else:
            self._unsaid[event] += 1
