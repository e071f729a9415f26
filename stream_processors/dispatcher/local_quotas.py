"""Quotas behind one protocol, and the ones that this process keeps by itself."""

from collections.abc import Callable, Sequence
from typing import Protocol

from fairlane.clock import ClockMs
from stream_processors.dispatcher.scheduling.quotas import Ask, Exceeded, QuotaBook, buckets_of, has_quotas


class Quotas(Protocol):
    """Keeps tenants to their quotas. Raises nothing because of a store that is out of reach."""

    async def take(self, asks: Sequence[Ask]) -> list[Exceeded | None]:
        """One answer for each ask, in their order; None took what it asked for. A refused ask takes nothing."""

    async def give_back(self, asks: Sequence[Ask]) -> None:
        """Undo asks that were granted: their requests came to nothing. Asked again, they take again."""

    async def hand_over(self, asks: Sequence[Ask]) -> None:
        """These were granted, and their partitions moved on: who reads the records next asks again."""


def _whole(_tenant: str) -> float:
    return 1.0


class LocalQuotas:
    """In memory: exact for what this process reads, gone when it ends.

    Args:
        clock: milliseconds.
        share: the part of a tenant's quotas, above 0 and at most 1, that is this process's: the part of its partitions
            that is read here.
    """

    def __init__(self, clock: ClockMs, share: Callable[[str], float] = _whole) -> None:
        self._clock = clock
        self._share = share
        self._book = QuotaBook()

    async def take(self, asks: Sequence[Ask]) -> list[Exceeded | None]:
        now_ms = self._clock()
        return [self._take(ask, now_ms) if has_quotas(ask.spec) else None for ask in asks]

    async def give_back(self, asks: Sequence[Ask]) -> None:
        now_ms = self._clock()
        for ask in asks:
            self._book.give_back(ask, buckets_of(ask.spec, self._share(ask.tenant)), now_ms)

    async def hand_over(self, asks: Sequence[Ask]) -> None:
        # The next reader takes from quotas of its own.
        await self.give_back(asks)

    def _take(self, ask: Ask, now_ms: int) -> Exceeded | None:
        return self._book.take(ask, buckets_of(ask.spec, self._share(ask.tenant)), now_ms)
