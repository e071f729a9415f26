"""What happens with every call while something is away: as many lines of it as anybody would read."""

from collections import Counter
from typing import Any

from fairlane.clock import ClockMs, monotonic_ms
from producers.gateway.limits.rate_buckets import RateBook, RatePolicy

_LINES = RatePolicy(rate_per_s=0.2, burst=3)
_MOST_EVENTS = 64


class LimitedLog:
    """Logs a few lines of each event, then one every five seconds, which says of how many it did not. Not for several
    threads.

    Args:
        log: where the lines go.
        clock: milliseconds, monotonic.
    """

    def __init__(self, log: Any, clock: ClockMs = monotonic_ms) -> None:
        self._log = log
        self._clock = clock
        self._book = RateBook(_MOST_EVENTS)
        self._unsaid: Counter[str] = Counter()

    def warning(self, event: str, **fields: object) -> None:
        """As the log's. ``event`` is a text of ours: there are few of them."""
        if self._book.take([event], _LINES, self._clock()).is_granted:
            self._log.warning(event, not_logged_before=self._unsaid.pop(event, 0), **fields)
        else:
            self._unsaid[event] += 1
