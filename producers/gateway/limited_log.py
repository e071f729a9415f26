"""Rate-limited logging of repeated failures."""

from collections import Counter
from typing import Any

from fairlane.clock import ClockMs, monotonic_ms
from producers.gateway.limits.rate_buckets import RatePolicy, TokenBuckets

_LINES = RatePolicy(rate_per_s=0.2, burst=3)
_MOST_EVENTS = 64


class LimitedLog:
    """Logs lines of an event at a bounded rate, each with the number suppressed since the last. ``clock`` gives
    monotonic milliseconds; ``rate`` is of each event: by default three lines, then one every five seconds. Not
    thread-safe."""

    def __init__(self, log: Any, clock: ClockMs = monotonic_ms, rate: RatePolicy = _LINES) -> None:
        self._log = log
        self._clock = clock
        self._rate = rate
        self._book = TokenBuckets(_MOST_EVENTS)
        self._unsaid: Counter[str] = Counter()

    def warning(self, event: str, kind: str = "", **fields: object) -> None:
        """Log a warning unless its event, of this kind, is over the rate. Both must be constants: there are few."""
        counted = f"{event}:{kind}"
        if self._book.take([counted], self._rate, self._clock()).is_granted:
            self._log.warning(event, not_logged_before=self._unsaid.pop(counted, 0), **fields)
        else:
            self._unsaid[counted] += 1
