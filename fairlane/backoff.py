"""How long to wait before the next attempt. Pure: the caller brings the random number, or a key to make it from."""

from dataclasses import dataclass
from hashlib import blake2b
from math import ceil


@dataclass(frozen=True, slots=True)
class Backoff:
    """Doubling from the first delay to the longest, with jitter; attempts never end.

    Attributes:
        first_s: delay after the first failure, in seconds.
        longest_s: bound of the delay, in seconds.
        jitter: the delay is shortened by up to this part of it.
    """

    first_s: float = 0.1
    longest_s: float = 3.0
    jitter: float = 0.5

    def delay_s(self, failures: int, chance: float) -> float:
        """The delay after this many failures in a row (at least 1); ``chance`` is a random number in [0, 1)."""
        # The exponent is bounded: failures are counted for as long as an outage lasts.
        delay_s = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 32))
        return delay_s * (1 - self.jitter * chance)


def spread_ms(least_ms: float, jitter: float, key: str) -> int:
    """``least_ms``, lengthened by up to ``jitter`` times itself: those who are told to come back together do not come
    back together. The same key is told the same each time."""
    digest = blake2b(key.encode(), digest_size=8).digest()
    return ceil(least_ms * (1 + jitter * int.from_bytes(digest) / 2**64))
