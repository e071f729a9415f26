"""How many keys one address may show in vain. Pure."""

from typing import Final

from producers.gateway.limits.rate_buckets import RateBook, RatePolicy

BURST_S: Final = 10.0
"""What may be shown at once, in seconds of the rate."""
MOST_ADDRESSES: Final = 20_000


def failure_policy(per_s: float) -> RatePolicy:
    """So many a second for ever, and ten times as many at once."""
    return RatePolicy(per_s, max(1, round(BURST_S * per_s)))


class FailedKeys:
    """Bounded; who failed least recently is forgotten first. Not for several threads."""

    def __init__(self, policy: RatePolicy, most_addresses: int = MOST_ADDRESSES) -> None:
        self._policy = policy
        self._book = RateBook(most_addresses)

    def may_try(self, address: str, now_ms: int) -> bool:
        """Whether this address may show a key that nothing is known of."""
        return self._book.peek(address, self._policy, now_ms).is_granted

    def failed(self, address: str, now_ms: int) -> None:
        """There was no such key."""
        self._book.take([address], self._policy, now_ms)
