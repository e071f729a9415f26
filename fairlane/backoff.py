"""Exponential backoff and jitter. Pure: the caller supplies the random number, or a key to derive it from."""

from dataclasses import dataclass
from hashlib import blake2b
from math import ceil


@dataclass(frozen=True, slots=True)
class Backoff:
    """Delays that double up to a bound, with jitter. The number of attempts is not limited.

    Attributes:
        first_s: delay after the first failure, in seconds.
        longest_s: bound of the delay, in seconds.
        jitter: largest fraction by which a delay is shortened.
    """

    first_s: float = 0.1
    longest_s: float = 3.0
    jitter: float = 0.5

    def delay_s(self, failures: int, chance: float) -> float:
        """The delay after this many failures in a row (at least 1); ``chance`` is a random number in [0, 1)."""
        # The exponent is bounded: the count of failures grows for as long as an outage lasts.
        delay_s = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 32))
        return delay_s * (1 - self.jitter * chance)


def jittered_ms(least_ms: float, jitter: float, key: str) -> int:
    """``least_ms`` plus up to ``jitter`` times itself, rounded up, so that clients rejected together do not retry
    together. The same key always gets the same delay."""
    digest = blake2b(key.encode(), digest_size=8).digest()
    return ceil(least_ms * (1 + jitter * int.from_bytes(digest) / 2**64))
