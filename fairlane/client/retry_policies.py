"""Retry policies: of a client's requests, and of a service's reply handler. Pure: failures in, a delay or None out."""

from dataclasses import dataclass

from fairlane.backoff import Backoff
from fairlane.outcomes import Outcome
from fairlane.records import InferenceReply

_JITTER = 0.2


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Bounds on a client's automatic retries, under the same request id.

    A request is published again after a refusal with a retry time, never before that time, and after a delivery whose
    outcome is unknown. The service runs one id once, so no request runs twice. All other results are final: invalid,
    expired, cancelled and failed requests.

    >>> with Client(tenant="acme", retries=RetryPolicy(tries=8, within_ms=120_000)) as patient:
    ...     once = patient.submit(model="smollm2-135m-instruct", prompt="2 + 2 = ?", retries=RetryPolicy(tries=1))
    ...     print(once.result(timeout=30).output.text)
    4

    Attributes:
        tries: how often a request is published at most, the first time included.
        within_ms: a request is not published again later than this after its submit, nor after its ``timeout_ms``.
        longest_wait_ms: a refusal with a longer retry time is final.

    Raises:
        ValueError: a bound is below 1.
    """

    tries: int = 5
    within_ms: int = 60_000
    longest_wait_ms: int = 30_000

    def __post_init__(self) -> None:
        for name in ("tries", "within_ms", "longest_wait_ms"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is below 1")

    def wait_after_refusal_ms(
        self, reply: InferenceReply, tries: int, elapsed_ms: int, timeout_ms: int | None, chance: float
    ) -> int | None:
        """Wait before a request with this reply is published again; None for no retry.

        ``tries`` were made in ``elapsed_ms`` since the submit, ``timeout_ms`` is the request's own, ``chance`` a random
        number in [0, 1): the wait is lengthened by up to a fifth, so that those refused together come back apart.
        """
        if reply.outcome != Outcome.REJECTED or reply.retry_after_ms is None:
            return None
        if reply.retry_after_ms > self.longest_wait_ms:
            return None
        # At least the backoff: a retry time of zero must not make a busy loop.
        least_ms = max(reply.retry_after_ms, _least_ms(tries, chance))
        return self._allowed(round(least_ms * (1 + _JITTER * chance)), tries, elapsed_ms, timeout_ms)

    def wait_after_lost_ms(self, tries: int, elapsed_ms: int, timeout_ms: int | None, chance: float) -> int | None:
        """The same for a request whose delivery is uncertain."""
        return self._allowed(_least_ms(tries, chance), tries, elapsed_ms, timeout_ms)

    def _allowed(self, wait_ms: int, tries: int, elapsed_ms: int, timeout_ms: int | None) -> int | None:
        last_ms = self.within_ms if timeout_ms is None else min(self.within_ms, timeout_ms - 1)
        return wait_ms if tries < self.tries and elapsed_ms + wait_ms <= last_ms else None


NO_RETRIES = RetryPolicy(tries=1)
"""Every request is published once, and every refusal is final. The default."""


def _least_ms(tries: int, chance: float) -> int:
    return round(Backoff(first_s=0.1, longest_s=5.0).delay_s(tries, chance) * 1_000)


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
        """Wait in seconds after this many consecutive failures; None for no further attempt."""
        return None if failures >= self.tries else self._backoff.delay_s(failures, chance)

    @property
    def _backoff(self) -> Backoff:
        return Backoff(self.first_wait_ms / 1_000, self.longest_wait_ms / 1_000)
