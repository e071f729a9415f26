"""Token buckets of callers. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fairlane_server.token_bucket import LONGEST_WAIT_MS, BucketLevels, full_in_ms, refilled, wait_ms

MOST_OWNERS = 100_000
_MS_PER_S = 1_000
# Rounding error of a whole call that was added up from fractions.
_ROUNDING = 1e-6


@dataclass(frozen=True, slots=True)
class RatePolicy:
    """Sustained calls per second of a bucket, and calls at once from a full one."""

    rate_per_s: float
    burst: int

    @property
    def per_ms(self) -> float:
        """Refill rate in calls per millisecond."""
        return self.rate_per_s / _MS_PER_S


@dataclass(frozen=True, slots=True)
class Allowance:
    """Result of one call, and what is left. With several buckets: the fewest calls and the longest times.

    Attributes:
        limit: calls in a full bucket.
        remaining: calls that may be made at once from now on.
        reset_ms: until all buckets are full again, if nothing is taken.
        retry_after_ms: until the same call would be granted; 0 if it was.
    """

    limit: int
    remaining: int
    reset_ms: int
    retry_after_ms: int

    @property
    def is_granted(self) -> bool:
        """Whether the call was granted."""
        return not self.retry_after_ms


def allowance(policy: RatePolicy, least: float, full_ms: int, longest_wait_ms: int) -> Allowance:
    """An Allowance in whole calls, with times of at most ``LONGEST_WAIT_MS``."""
    remaining = max(0, math.floor(least + _ROUNDING))
    return Allowance(policy.burst, remaining, min(full_ms, LONGEST_WAIT_MS), min(longest_wait_ms, LONGEST_WAIT_MS))


@dataclass(frozen=True, slots=True)
class _Level:
    amount: float
    at_ms: int


class TokenBuckets:
    """Buckets by owner; full ones are not stored. Beyond ``most_owners``, the owner that called least recently is
    forgotten, and may burst again. A clock that goes back refills nothing until it has caught up. Not thread-safe."""

    def __init__(self, most_owners: int = MOST_OWNERS) -> None:
        self._levels: BucketLevels[_Level] = BucketLevels(most_owners)

    def take(self, owners: Sequence[str], policy: RatePolicy, now_ms: int) -> Allowance:
        """Take one call from the bucket of each owner (at least one, none twice), from all of them or from none."""
        self._levels.sweep(now_ms)
        levels = {owner: self._refilled(owner, policy, now_ms) for owner in owners}
        longest_ms = max(
            wait_ms(policy.burst, policy.per_ms, 1 - level.amount, level.at_ms - now_ms) for level in levels.values()
        )
        if longest_ms == 0:
            levels = {owner: _Level(level.amount - 1, level.at_ms) for owner, level in levels.items()}
        full_ms = 0
        for owner, level in levels.items():
            full_at_ms = level.at_ms + full_in_ms(policy.burst, policy.per_ms, level.amount)
            self._levels.put(owner, level, full_at_ms)
            full_ms = max(full_ms, full_at_ms - now_ms)
        return allowance(policy, min(level.amount for level in levels.values()), full_ms, longest_ms)

    def peek(self, owner: str, policy: RatePolicy, now_ms: int) -> Allowance:
        """The result of a call now, without taking it."""
        level = self._refilled(owner, policy, now_ms)
        full_ms = level.at_ms + full_in_ms(policy.burst, policy.per_ms, level.amount) - now_ms
        waits_ms = wait_ms(policy.burst, policy.per_ms, 1 - level.amount, level.at_ms - now_ms)
        return allowance(policy, level.amount, full_ms, waits_ms)

    def _refilled(self, owner: str, policy: RatePolicy, now_ms: int) -> _Level:
        known = self._levels.get(owner)
        if known is None:
            return _Level(policy.burst, now_ms)
        at_ms = max(now_ms, known.at_ms)
        return _Level(refilled(policy.burst, policy.per_ms, known.amount, at_ms - known.at_ms), at_ms)

    def __len__(self) -> int:
        """Number of stored buckets."""
        return len(self._levels)
