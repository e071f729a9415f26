"""Retry policy of a service's reply handler. Pure: failures in, a delay or None out."""

from dataclasses import dataclass

from fairlane.backoff import Backoff


@dataclass(frozen=True, slots=True)
class HandlerRetries:
    """Waits that double, with jitter, up to the longest; after ``tries`` the reply is a dead letter.

    While a reply waits, those behind it wait too: replies are handled in the order of their partition.

    Attributes:
        tries: how often the handler is called for one reply at most.
        first_wait_ms: after the first failure.
        longest_wait_ms: bound of each wait.

    Raises:
        ValueError: ``tries`` is below 1, or a wait below 0.
    """

    tries: int = 5
    first_wait_ms: int = 200
    longest_wait_ms: int = 5_000

    def __post_init__(self) -> None:
        for name, least in (("tries", 1), ("first_wait_ms", 0), ("longest_wait_ms", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name}: {getattr(self, name)} is below {least}")

    @property
    def longest_total_ms(self) -> int:
        """The most that all waits for one reply take together."""
        return round(sum(self._backoff.delay_s(failures, 0.0) for failures in range(1, self.tries)) * 1_000)

    def wait_s(self, failures: int, chance: float) -> float | None:
        """How long to wait after this many failures in a row; None when there is no further try."""
        return None if failures >= self.tries else self._backoff.delay_s(failures, chance)

    @property
    def _backoff(self) -> Backoff:
        return Backoff(self.first_wait_ms / 1_000, self.longest_wait_ms / 1_000)
