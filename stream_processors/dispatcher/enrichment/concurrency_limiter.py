"""Concurrency limiter of look-ups, fair across tenants."""

import asyncio
from collections import Counter, deque
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


class NoPermitError(Exception):
    """No permit was granted in time."""


@dataclass(slots=True, eq=False)
class Permit:
    """A permit of one look-up: queued for, granted, and released; ``asking`` queues for it again.

    Attributes:
        granted: done once the permit is granted.
        queries: queries about to begin at once: the permit is not released before they have begun.
    """

    limiter: "FairConcurrencyLimiter"
    tenant: str
    urgency: Urgency
    granted: "asyncio.Future[None]"
    queries: int = 0
    is_held: bool = False
    _asking: int = 0

    @asynccontextmanager
    async def asking(self, until_s: float) -> AsyncIterator[None]:
        """Held during a query; released when none runs. Raises NoPermitError without a permit by ``until_s``, in the
        event loop's time."""
        if self.queries:
            self.queries -= 1
        elif not self.is_held:
            await self._queue_again(until_s)
        if not self._asking:
            metrics.RETRIEVALS_UNDER_WAY.inc()
        self._asking += 1
        try:
            yield
        finally:
            self._asking -= 1
            if not self._asking:
                metrics.RETRIEVALS_UNDER_WAY.dec()
                if not self.queries:
                    self.limiter.leave(self)

    async def _queue_again(self, until_s: float) -> None:
        self.limiter.enter(self)
        try:
            async with asyncio.timeout_at(until_s):
                await self.granted
        except BaseException as error:
            self.limiter.leave(self)
            if isinstance(error, TimeoutError):
                raise NoPermitError("too much is asked at the same time") from None
            raise


@dataclass(slots=True)
class FairConcurrencyLimiter:
    """Grants ``limit`` permits at a time, at most ``per_tenant`` to one tenant.

    The more urgent goes first; within an urgency tenants take turns, so no tenant waits for the length of another's
    queue. On one event loop.
    """

    limit: int
    per_tenant: int
    _held: Counter[str] = field(default_factory=Counter)
    """Granted permits by tenant."""
    _lines: dict[Urgency, dict[str, deque[Permit]]] = field(
        default_factory=lambda: {urgency: {} for urgency in Urgency}
    )
    """The tenant that goes next is first."""

    def permit(self, tenant: str, urgency: Urgency) -> Permit:
        """Queue for a permit. Every permit must be passed to ``leave`` in the end."""
        permit = Permit(self, tenant, urgency, asyncio.get_running_loop().create_future())
        self.enter(permit)
        return permit

    def enter(self, permit: Permit) -> None:
        """Queue for a permit that was released."""
        if permit.granted.done():
            permit.granted = asyncio.get_running_loop().create_future()
        self._lines[permit.urgency].setdefault(permit.tenant, deque()).append(permit)
        self._let_in()

    def hurry(self, permit: Permit, urgency: Urgency) -> None:
        if urgency < permit.urgency:
            is_queued = self._take_out(permit)
            permit.urgency = urgency
            if is_queued:
                self.enter(permit)

    def leave(self, permit: Permit) -> None:
        if permit.is_held:
            permit.is_held = False
            self._held[permit.tenant] -= 1
            if not self._held[permit.tenant]:
                del self._held[permit.tenant]
        else:
            self._take_out(permit)
        self._let_in()

    def _take_out(self, permit: Permit) -> bool:
        lines = self._lines[permit.urgency]
        line = lines.get(permit.tenant)
        if line is None or permit not in line:
            return False
        line.remove(permit)
        if not line:
            del lines[permit.tenant]
        return True

    def _let_in(self) -> None:
        while self._held.total() < self.limit:
            permit = self._next()
            if permit is None:
                return
            permit.is_held = True
            self._held[permit.tenant] += 1
            if not permit.granted.done():
                permit.granted.set_result(None)

    def _next(self) -> Permit | None:
        for lines in self._lines.values():
            for tenant in lines:
                if self._held[tenant] < self.per_tenant:
                    line = lines.pop(tenant)
                    permit = line.popleft()
                    if line:
                        lines[tenant] = line
                    return permit
        return None

    def __len__(self) -> int:
        return self._held.total()
