"""Quotas of tenants: token buckets for requests per second, tokens per minute and tokens per day. Pure.

Over any interval a bucket grants at most its rate times the interval plus its burst. The burst of a token quota is one
whole period of it, so that a single large request fits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from fairlane.frozen import frozen_dataclass
from fairlane.records import SourceCoordinate, TenantSpec
from fairlane_server.token_bucket import LONGEST_WAIT_MS, BucketLevels, full_in_ms, refilled, wait_ms

_MS_PER_S = 1_000
_MS_PER_MINUTE = 60_000
_MS_PER_DAY = 86_400_000


class Quota(StrEnum):
    """The quotas of a tenant, named like the fields of TenantSpec that set them."""

    REQUESTS_PER_S = "requests_per_s"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENS_PER_DAY = "tokens_per_day"


@frozen_dataclass(frozen=True, slots=True)
class Charge:
    """One request of ``tenant``, of ``tokens`` cost tokens, against the quotas of ``spec``.

    ``record`` is its source coordinate; it is not charged after ``until_ms``, its deadline: a store that outlives the
    process keeps the grant of the record until then.
    """

    tenant: str
    spec: TenantSpec
    tokens: int
    record: SourceCoordinate | None = None
    until_ms: int = 0


@frozen_dataclass(frozen=True, slots=True)
class Exceeded:
    """The exceeded quota, and when the same charge would be granted without other charges, at most ``LONGEST_WAIT_MS``.

    ``retry_after_ms`` is None for a charge above the quota's capacity: waiting does not help.
    """

    which: Quota
    retry_after_ms: int | None


@frozen_dataclass(frozen=True, slots=True)
class Bucket:
    """One quota of a tenant, or a share of it.

    Attributes:
        quota: the quota.
        capacity: amount when full; it starts full.
        per_ms: refill per millisecond.
        largest: the largest charge. Above the capacity for a share of a quota: it is granted when the bucket is full
            and leaves it in debt.
    """

    quota: Quota
    capacity: float
    per_ms: float
    largest: float

    def amount(self, charge: Charge) -> int:
        return 1 if self.quota is Quota.REQUESTS_PER_S else max(0, charge.tokens)


def has_quotas(spec: TenantSpec) -> bool:
    return not (spec.requests_per_s is None and spec.tokens_per_minute is None and spec.tokens_per_day is None)


def buckets_of(spec: TenantSpec, share: float = 1.0) -> tuple[Bucket, ...]:
    """The buckets of a tenant, or their ``share`` (above 0, at most 1); none for a tenant without quotas.

    Without ``burst_requests`` the burst is the requests of one second, and at least one.
    """
    buckets = []
    if spec.requests_per_s is not None:
        burst = float(spec.burst_requests or max(1.0, spec.requests_per_s)) if spec.requests_per_s > 0 else 0.0
        buckets.append(_bucket(Quota.REQUESTS_PER_S, burst, spec.requests_per_s / _MS_PER_S, share))
    for quota, tokens, period_ms in (
        (Quota.TOKENS_PER_MINUTE, spec.tokens_per_minute, _MS_PER_MINUTE),
        (Quota.TOKENS_PER_DAY, spec.tokens_per_day, _MS_PER_DAY),
    ):
        if tokens is not None:
            buckets.append(_bucket(quota, float(tokens), tokens / period_ms, share))
    return tuple(buckets)


def _bucket(quota: Quota, capacity: float, per_ms: float, share: float) -> Bucket:
    return Bucket(quota, capacity * share, per_ms * share, capacity)


@dataclass(slots=True)
class _Levels:
    """Amounts of a tenant's buckets as of ``at_ms``, and when all of them will be full."""

    amounts: dict[Quota, float]
    at_ms: int
    full_at_ms: int


class QuotaBook:
    """The buckets of every tenant with one that is not full. For one thread.

    A clock that goes back refills nothing until it has caught up. Every operation is O(1).
    """

    def __init__(self) -> None:
        self._levels: BucketLevels[_Levels] = BucketLevels()

    def take(self, charge: Charge, buckets: Sequence[Bucket], now_ms: int) -> Exceeded | None:
        """Take the charge from all its buckets; or nothing, and return the quota with the longest wait."""
        self._levels.sweep(now_ms)
        levels = self._refilled(charge.tenant, buckets, now_ms)
        waits_ms = [
            _wait_ms(bucket, levels.amounts[bucket.quota], bucket.amount(charge), levels.at_ms - now_ms)
            for bucket in buckets
        ]
        longest_ms = max(waits_ms, default=0)
        if longest_ms > 0:
            which = buckets[waits_ms.index(longest_ms)].quota
            return Exceeded(which, None if math.isinf(longest_ms) else min(int(longest_ms), LONGEST_WAIT_MS))
        self._add(charge, buckets, levels, -1)
        return None

    def give_back(self, charge: Charge, buckets: Sequence[Bucket], now_ms: int) -> None:
        """Undo a granted ``take``; no bucket exceeds its capacity."""
        self._add(charge, buckets, self._refilled(charge.tenant, buckets, now_ms), 1)

    def _refilled(self, tenant: str, buckets: Sequence[Bucket], now_ms: int) -> _Levels:
        known = self._levels.get(tenant)
        if known is None:
            return _Levels({bucket.quota: bucket.capacity for bucket in buckets}, now_ms, now_ms)
        at_ms = max(now_ms, known.at_ms)
        amounts = {}
        for bucket in buckets:
            amount = known.amounts.get(bucket.quota, bucket.capacity)
            amounts[bucket.quota] = refilled(bucket.capacity, bucket.per_ms, amount, at_ms - known.at_ms)
        return _Levels(amounts, at_ms, at_ms)

    def _add(self, charge: Charge, buckets: Sequence[Bucket], levels: _Levels, sign: int) -> None:
        for bucket in buckets:
            amount = min(bucket.capacity, levels.amounts[bucket.quota] + sign * bucket.amount(charge))
            levels.amounts[bucket.quota] = amount
            if amount < bucket.capacity:
                full_at_ms = levels.at_ms + full_in_ms(bucket.capacity, bucket.per_ms, amount)
                levels.full_at_ms = max(levels.full_at_ms, full_at_ms)
        if buckets:
            self._levels.put(charge.tenant, levels, levels.full_at_ms)

    def __len__(self) -> int:
        return len(self._levels)


def _wait_ms(bucket: Bucket, amount: float, wanted: int, clock_is_behind_ms: int) -> float:
    """Time until ``wanted`` can be taken: 0 if now, infinite if never."""
    if wanted > bucket.largest:
        return math.inf
    return wait_ms(bucket.capacity, bucket.per_ms, min(wanted, bucket.capacity) - amount, clock_is_behind_ms)


class Quotas(Protocol):
    """Enforces the tenants' quotas. No method raises while the store is unavailable."""

    async def take(self, charges: Sequence[Charge]) -> list[Exceeded | None]:
        """One answer per charge, in order: None when granted, else the quota exceeded, and nothing is taken."""

    async def give_back(self, charges: Sequence[Charge]) -> None:
        """Refund granted charges whose requests are not dispatched. The same record is charged again next time."""

    async def hand_over(self, charges: Sequence[Charge]) -> None:
        """Release granted charges whose partitions were revoked: the new owner charges the same records again."""


class LocalQuotas:
    """Quotas in memory: exact for this process's partitions, lost when it ends.

    Args:
        clock: milliseconds.
        share: this process's fraction of a tenant's quotas, above 0 and at most 1: the fraction of its partitions read
            here.
    """

    def __init__(self, clock: Callable[[], int], share: Callable[[str], float] = lambda _tenant: 1.0) -> None:
        self._clock = clock
        self._share = share
        self._book = QuotaBook()

    async def take(self, charges: Sequence[Charge]) -> list[Exceeded | None]:
        now_ms = self._clock()
        return [
            self._book.take(charge, buckets_of(charge.spec, self._share(charge.tenant)), now_ms)
            if has_quotas(charge.spec)
            else None
            for charge in charges
        ]

    async def give_back(self, charges: Sequence[Charge]) -> None:
        now_ms = self._clock()
        for charge in charges:
            self._book.give_back(charge, buckets_of(charge.spec, self._share(charge.tenant)), now_ms)

    async def hand_over(self, charges: Sequence[Charge]) -> None:
        # The next reader charges its own local quotas.
        await self.give_back(charges)
