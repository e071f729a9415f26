"""Quota protocol, and quotas kept in this process's memory."""

from collections.abc import Callable, Sequence
from typing import Protocol

from fairlane.clock import ClockMs
from stream_processors.dispatcher.admission.quotas import Ask, Exceeded, QuotaBook, buckets_of, has_quotas


class Quotas(Protocol):
    """Enforces the tenants' quotas. No method raises while the store is unavailable."""

    async def take(self, asks: Sequence[Ask]) -> list[Exceeded | None]:
        """One answer per ask, in order: None when granted, else the quota exceeded. A refused ask is not charged."""

    async def give_back(self, asks: Sequence[Ask]) -> None:
        """Refund granted asks whose requests are not dispatched. The same record asked again is charged again."""

    async def hand_over(self, asks: Sequence[Ask]) -> None:
        """Release granted asks whose partitions were revoked: the new owner asks again for the same records."""


class LocalQuotas:
    """Quotas in memory: exact for this process's partitions, lost when it ends.

    Args:
        clock: milliseconds.
        share: this process's fraction of a tenant's quotas, above 0 and at most 1: the fraction of its partitions read
            here.
    """

    def __init__(self, clock: ClockMs, share: Callable[[str], float] = lambda _tenant: 1.0) -> None:
        self._clock = clock
        self._share = share
        self._book = QuotaBook()

    async def take(self, asks: Sequence[Ask]) -> list[Exceeded | None]:
        now_ms = self._clock()
        return [
            self._book.take(ask, buckets_of(ask.spec, self._share(ask.tenant)), now_ms)
            if has_quotas(ask.spec)
            else None
            for ask in asks
        ]

    async def give_back(self, asks: Sequence[Ask]) -> None:
        now_ms = self._clock()
        for ask in asks:
            self._book.give_back(ask, buckets_of(ask.spec, self._share(ask.tenant)), now_ms)

    async def hand_over(self, asks: Sequence[Ask]) -> None:
        # The next reader charges its own local quotas.
        await self.give_back(asks)

    def _take(self, ask: Ask, now_ms: int) -> Exceeded | None:
        return self._book.take(ask, buckets_of(ask.spec, self._share(ask.tenant)), now_ms)
