"""Limit of failed API keys per address. Pure."""

from typing import Final

from producers.gateway.limits.rate_buckets import RatePolicy, TokenBuckets

BURST_S: Final = 10.0
"""Burst, in seconds of the rate."""
MOST_ADDRESSES: Final = 20_000


def failure_policy(per_s: float) -> RatePolicy:
    """``per_s`` failures per second, with a burst of ``BURST_S`` seconds."""
    return RatePolicy(per_s, max(1, round(BURST_S * per_s)))


class FailedKeys:
    """Failures by address. Bounded: the address that failed least recently is forgotten first. Not thread-safe."""

    def __init__(self, policy: RatePolicy, most_addresses: int = MOST_ADDRESSES) -> None:
        self._policy = policy
        self._book = TokenBuckets(most_addresses)

    def may_try(self, address: str, now_ms: int) -> bool:
        """Whether this address may present an unknown key."""
        return self._book.peek(address, self._policy, now_ms).is_granted

    def failed(self, address: str, now_ms: int) -> None:
        """Count a failed key."""
        self._book.take([address], self._policy, now_ms)
