"""The permit of one look-up: held during its queries, released while it only waits."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from fairlane import metrics
from stream_processors.dispatcher.enrichment.concurrency_limiter import FairConcurrencyLimiter, Ticket


class NoPlaceError(Exception):
    """No permit was granted in time."""


@dataclass(slots=True, eq=False)
class Permit:
    """One permit for all concurrent queries of a look-up: released when none runs, taken again for later ones. On one
    event loop.

    Args:
        gate: the limiter.
        ticket: granted; released here from now on. Later tickets have its present urgency.
        questions: queries about to start at once: the permit is not released before they have begun.
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
        """Held during a query. Raises NoPlaceError without a permit by ``until_s``, in the event loop's time."""
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
        """Release the permit; no further query follows."""
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
