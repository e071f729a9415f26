"""The permit of one look-up: held during its queries, released while it only waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fairlane import metrics
from stream_processors.dispatcher.enrichment.concurrency_limiter import FairConcurrencyLimiter, Ticket


class NoPlaceError(Exception):
    """The gate let nobody of this tenant in, in time."""


@dataclass(slots=True, eq=False)
class Permit:
    """One place, whatever its look-up asks at the same time: given back when nothing is asked any more, and taken again
    for what is asked later. On one event loop.

    Args:
        gate: that it is a place of.
        ticket: that was granted, and is given back here from now on. Places that are taken later are as urgent as it
            has become.
        questions: so many are asked at once: the place is not given back before they have begun.
    """

    gate: FairConcurrencyLimiter
    ticket: Ticket
    questions: int = 0
    _held: Ticket | None = field(init=False)
    _asking: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._hold(self.ticket)

    @asynccontextmanager
    async def asking(self, until_s: float) -> AsyncIterator[None]:
        """While something is asked. Raises NoPlaceError if there is no place until then, in the event loop's time."""
        if self.questions:
            self.questions -= 1
        elif self._held is None:
            await self._take(until_s)
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking and not self.questions:
                self.give_back()

    def give_back(self) -> None:
        """Nothing is asked any more, whatever was to be."""
        self.questions = 0
        if self._held is not None:
            held, self._held = self._held, None
            metrics.RETRIEVALS_UNDER_WAY.dec()
            self.gate.leave(held)

    async def _take(self, until_s: float) -> None:
        ticket = self.gate.ticket(self.ticket.tenant, self.ticket.urgency)
        try:
            async with asyncio.timeout_at(until_s):
                await ticket.granted
        except BaseException as error:
            self.gate.leave(ticket)
            if isinstance(error, TimeoutError):
                raise NoPlaceError("too much is asked at the same time") from None
            raise
        self._hold(ticket)

    def _hold(self, ticket: Ticket) -> None:
        self._held = ticket
        metrics.RETRIEVALS_UNDER_WAY.inc()
