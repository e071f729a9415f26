"""Conversation history of a request, within a budget, with the reason when it is incomplete."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field

from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane.outcomes import HistoryReason
from fairlane_server.circuit_breaker import CircuitBreaker
from fairlane_server.conversations.turns import StoredTurns, TurnStore
from fairlane_server.store_error import StoreError
from stream_processors.dispatcher.enrichment.concurrency_limiter import NoPermitError
from stream_processors.dispatcher.enrichment.context import ReadHistory
from stream_processors.dispatcher.enrichment.tenant_breakers import GRACE_S, BreakerOpenError, TenantBreakers

log = get_logger(__name__)

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.04
_LEAST_BUDGET_S = 0.01
"""Below this time no query is repeated: it would be late."""

_PART_TO_READ = 0.2
"""Fraction of the budget kept for reading the present turns if the awaited one does not come."""

_PART_IN_VAIN = 0.5
"""Fraction of ``max_wait_s``: a shorter wait does not count as a failure."""

Asking = Callable[[float], AbstractAsyncContextManager[None]]
"""Makes the context held during each query: entered by the given time of the event loop, or it raises NoPermitError."""


@dataclass(slots=True)
class HistoryReader:
    """Never raises because of the store. ``clock`` is monotonic.

    After several waits in vain in a row, a tenant's missing turns are not awaited for a while.
    """

    store: TurnStore
    clock: ClockMs
    _breakers: TenantBreakers = field(init=False)
    _waits: TenantBreakers = field(init=False)
    """Breakers of the waits for turns not recorded yet."""

    def __post_init__(self) -> None:
        self._breakers = TenantBreakers(self.clock)
        self._waits = TenantBreakers(self.clock)

    async def read(
        self,
        tenant: str,
        conversation_id: str,
        after: str | None,
        max_tokens: int,
        budget_s: float,
        is_urgent: Callable[[], bool],
        *,
        max_wait_s: float | None = None,
        asking: Asking = lambda _until_s: nullcontext(),
    ) -> ReadHistory:
        """The newest turns, within the budget.

        If the turn ``after`` is not recorded yet and ``is_urgent()``, query again for at most ``max_wait_s``, and at
        most four fifths of the budget; a request that still waits for its turn can look up again. Turns are read when
        that turn is recorded, or once in the end.
        """
        started_ms = self.clock()
        deadline_s = asyncio.get_running_loop().time() + budget_s
        look = _Look(self.store, self._breakers, tenant, conversation_id, max_tokens, deadline_s, asking)
        try:
            if after is None:
                turns = await look.read(None)
            else:
                turns = await self._after(look, after, budget_s if max_wait_s is None else max_wait_s, is_urgent)
            reason = None if turns.has_after else HistoryReason.BEHIND
        except (NoPermitError, StoreError, TimeoutError) as error:
            turns, reason = StoredTurns(), _reason(error, tenant)
        return ReadHistory(turns, reason, max(0, self.clock() - started_ms))

    async def _after(self, look: "_Look", after: str, max_wait_s: float, is_urgent: Callable[[], bool]) -> StoredTurns:
        waits = self._waits.of(look.tenant)
        if not is_urgent():
            found = await look.read(after)
            if found.has_after or not is_urgent():
                return found
        if waits.lets_through(self.clock()):
            found = await self._waited(look, after, max_wait_s, waits)
        else:
            found = await look.read(after)
        if found.has_after:
            waits.succeeded()
        return found

    async def _waited(self, look: "_Look", after: str, max_wait_s: float, waits: CircuitBreaker) -> StoredTurns:
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            came = await look.wait_for(after, max_wait_s)
        except BaseException:
            waits.abandoned()
            raise
        if came is not None:
            return came
        if loop.time() - started_s < _PART_IN_VAIN * max_wait_s:
            waits.abandoned()
        else:
            waits.failed(self.clock(), random.random())  # noqa: S311 - jitter, no secret
        return await look.read(after)


@dataclass(frozen=True, slots=True)
class _Look:
    """One look-up of one conversation."""

    store: TurnStore
    breakers: TenantBreakers
    tenant: str
    conversation_id: str
    max_tokens: int
    deadline_s: float
    asking: Asking

    async def read(self, after: str | None) -> StoredTurns:
        """Read the present turns. Raises NoPermitError, StoreError, TimeoutError."""
        async with self.asking(self.deadline_s - _LEAST_BUDGET_S):
            call = self.store.turns(self.tenant, self.conversation_id, after, self.max_tokens, self._left_s())
            return await self.breakers.ask(self.tenant, call, self.deadline_s + GRACE_S)

    async def wait_for(self, after: str, max_wait_s: float) -> StoredTurns | None:
        """The turns once ``after`` is recorded; None if it does not come while there is time to read without it.

        Raises NoPermitError, StoreError, TimeoutError.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + min(max_wait_s, (1 - _PART_TO_READ) * (self.deadline_s - loop.time()))
        pause_s = _FIRST_PAUSE_S
        while (found := await self._with(after, until_s)) is None:
            left_s = until_s - loop.time()
            if left_s < _FIRST_PAUSE_S:
                break
            await asyncio.sleep(min(pause_s, left_s))
            if loop.time() >= until_s:
                break
            pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)
        return found

    async def _with(self, after: str, until_s: float) -> StoredTurns | None:
        try:
            async with self.asking(until_s):
                call = self.store.turns_with(self.tenant, self.conversation_id, after, self.max_tokens, self._left_s())
                # A missing turn does not prove that turns can be read.
                found = await self.breakers.ask(self.tenant, call, self.deadline_s + GRACE_S, proves=False)
        except NoPermitError:
            return None
        if found is not None:
            self.breakers.of(self.tenant).succeeded()
        return found

    def _left_s(self) -> float:
        return max(0.001, self.deadline_s - asyncio.get_running_loop().time())


def _reason(error: Exception, tenant: str) -> HistoryReason:
    if isinstance(error, NoPermitError):
        return HistoryReason.BUSY
    if isinstance(error, TimeoutError):
        return HistoryReason.LATE
    if not isinstance(error, BreakerOpenError):
        log.warning("history_failed", tenant=tenant, error=str(error))
    return HistoryReason.UNAVAILABLE
