"""Circuit breaker: stops calls to a dependency that fails, and retries now and then. Pure: no clock inside."""

from dataclasses import dataclass, field

from fairlane.backoff import Backoff


@dataclass(frozen=True, slots=True)
class BreakerPolicy:
    """So many ``failures`` in a row open the breaker; it rests, longer after each failed try."""

    failures: int = 5
    rest: Backoff = field(default_factory=lambda: Backoff(first_s=0.25, longest_s=2.0))


@dataclass(slots=True)
class CircuitBreaker:
    """Closed it lets everything through, open nothing, half open one try at a time (Nygard, "Release It!", 2007).

    What was let through reports ``succeeded``, ``failed`` or, if it ended as neither, ``abandoned``.
    """

    policy: BreakerPolicy = field(default_factory=BreakerPolicy)
    _failures: int = 0
    _tries: int = 0
    """That failed since it opened."""
    _opens_at_ms: float | None = None
    """When the next try may be made; None while it is closed."""
    _is_trying: bool = False

    def lets_through(self, now_ms: float) -> bool:
        """Whether to call now. While the breaker is open, True makes the caller the probe."""
        if self._opens_at_ms is None:
            return True
        if self._is_trying or now_ms < self._opens_at_ms:
            return False
        self._is_trying = True
        return True

    def succeeded(self) -> None:
        """It answers: everything is let through."""
        self._failures = self._tries = 0
        self._opens_at_ms, self._is_trying = None, False

    def failed(self, now_ms: float, jitter: float) -> None:
        """It did not answer; ``jitter`` is a random number from 0 to 1."""
        if self._opens_at_ms is not None and not self._is_trying:
            # Asked before it opened.
            return
        self._failures += 1
        if self._failures >= self.policy.failures:
            self._tries += 1
            self._opens_at_ms = now_ms + 1_000 * self.policy.rest.delay_s(self._tries, jitter)
        self._is_trying = False

    def abandoned(self) -> None:
        """It was not seen whether it answers: another may try."""
        self._is_trying = False

    @property
    def is_open(self) -> bool:
        return self._opens_at_ms is not None
