"""Concurrency limiter of retrievals, fair across tenants, and the permit of one look-up."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import IntEnum

from fairlane import metrics


class Urgency(IntEnum):
    """Priority of a look-up; the lowest number goes first."""

    TURN_HIGH = 0
    TURN_NORMAL = 1
    TURN_LOW = 2
    WAITS = 3
    """Its request is still queued."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A waiting or granted permit of a tenant."""

    tenant: str
    urgency: Urgency
    granted: "asyncio.Future[None]"


@dataclass(slots=True)
class FairConcurrencyLimiter:
    """Grants ``limit`` permits at a time, at most ``per_tenant`` to one tenant.

    The more urgent goes first; within an urgency tenants take turns, so no tenant waits for the length of another's
    queue. On one event loop.
    """

    limit: int
    per_tenant: int
    _inside: dict[str, int] = field(default_factory=dict)
    _lines: dict[Urgency, dict[str, deque[Ticket]]] = field(
        default_factory=lambda: {urgency: {} for urgency in Urgency}
    )
    """The tenant that goes next is first."""

    def ticket(self, tenant: str, urgency: Urgency) -> Ticket:
        """Queue for a permit. Every ticket must be passed to ``leave`` in the end."""
        ticket = Ticket(tenant, urgency, asyncio.get_running_loop().create_future())
        self._line(ticket).append(ticket)
        self._let_in()
        return ticket

    def hurry(self, ticket: Ticket, urgency: Urgency) -> None:
        """Raise the urgency of a ticket."""
        if urgency < ticket.urgency:
            waits = self._take_out(ticket)
            ticket.urgency = urgency
            if waits:
                self._line(ticket).append(ticket)
                self._let_in()

    def leave(self, ticket: Ticket) -> None:
        """Release the permit, or leave the queue."""
        if not self._take_out(ticket):
            left = self._inside[ticket.tenant] - 1
            if left:
                self._inside[ticket.tenant] = left
            else:
                del self._inside[ticket.tenant]
        self._let_in()

    def _line(self, ticket: Ticket) -> deque[Ticket]:
        return self._lines[ticket.urgency].setdefault(ticket.tenant, deque())

    def _take_out(self, ticket: Ticket) -> bool:
        """Returns whether it was queued."""
        lines = self._lines[ticket.urgency]
        line = lines.get(ticket.tenant)
        if line is None or ticket not in line:
            return False
        line.remove(ticket)
        if not line:
            del lines[ticket.tenant]
        return True

    def _let_in(self) -> None:
        while sum(self._inside.values()) < self.limit:
            ticket = self._next()
            if ticket is None:
                return
            self._inside[ticket.tenant] = self._inside.get(ticket.tenant, 0) + 1
            if not ticket.granted.done():
                ticket.granted.set_result(None)

    def _next(self) -> Ticket | None:
        for lines in self._lines.values():
            for tenant in lines:
                if self._inside.get(tenant, 0) < self.per_tenant:
                    line = lines.pop(tenant)
                    ticket = line.popleft()
                    if line:
                        lines[tenant] = line
                    return ticket
        return None

    def __len__(self) -> int:
        """Number of granted permits."""
        return sum(self._inside.values())


class NoPermitError(Exception):
    """No permit was granted in time."""


@dataclass(slots=True, eq=False)
class Permit:
    """One permit for all concurrent queries of a look-up: released when none runs, taken again for later ones. On one
    event loop.

    Args:
        limiter: the limiter.
        ticket: granted; released here from now on. Later tickets have its present urgency.
        questions: queries about to start at once: the permit is not released before they have begun.
    """

    limiter: FairConcurrencyLimiter
    ticket: Ticket
    questions: int = 0
    _held: Ticket | None = field(init=False)
    _asking: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._hold(self.ticket)

    @asynccontextmanager
    async def asking(self, until_s: float) -> AsyncIterator[None]:
        """Held during a query. Raises NoPermitError without a permit by ``until_s``, in the event loop's time."""
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
            self.limiter.leave(held)

    async def _take(self, until_s: float) -> None:
        ticket = self.limiter.ticket(self.ticket.tenant, self.ticket.urgency)
        try:
            async with asyncio.timeout_at(until_s):
                await ticket.granted
        except BaseException as error:
            self.limiter.leave(ticket)
            if isinstance(error, TimeoutError):
                raise NoPermitError("too much is asked at the same time") from None
            raise
        self._hold(ticket)

    def _hold(self, ticket: Ticket) -> None:
        self._held = ticket
        metrics.RETRIEVALS_UNDER_WAY.inc()
