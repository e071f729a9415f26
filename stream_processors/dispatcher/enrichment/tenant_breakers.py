"""Store calls with a deadline and a circuit breaker per tenant."""

import asyncio
import random
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cachetools import LRUCache

from fairlane.clock import ClockMs
from fairlane_server.circuit_breaker import CircuitBreaker
from fairlane_server.retrieval.store import CollectionNotFoundError
from fairlane_server.store_error import StoreError

GRACE_S = 0.02
"""Extra time of the guard after the call's own time-out: of two time-outs at the same moment only the outer one would
be seen."""

_MAX_BREAKERS = 4_096

AnswerT = TypeVar("AnswerT")


class BreakerOpenError(StoreError):
    """The tenant's breaker is open: the call was not made."""


@dataclass(slots=True)
class TenantBreakers:
    """One breaker per tenant: late calls of one do not stop those of others. ``clock`` is monotonic."""

    clock: ClockMs
    _breakers: LRUCache[str, CircuitBreaker] = field(default_factory=lambda: LRUCache(_MAX_BREAKERS))

    async def ask(
        self, tenant: str, call: Coroutine[Any, Any, AnswerT], deadline_s: float, *, proves: bool = True
    ) -> AnswerT:
        """Make the call by the deadline. ``proves``: success closes the breaker; a failure counts in any case.

        Raises BreakerOpenError, TimeoutError, and the errors of the call.
        """
        breaker = self.of(tenant)
        if not breaker.lets_through(self.clock()):
            call.close()
            raise BreakerOpenError("it did not answer of late")
        answered = breaker.succeeded if proves else breaker.abandoned
        try:
            async with asyncio.timeout_at(deadline_s):
                answer = await call
        except CollectionNotFoundError:
            answered()
            raise
        except (StoreError, TimeoutError):
            breaker.failed(self.clock(), random.random())  # noqa: S311 - jitter, no secret
            raise
        except BaseException:
            breaker.abandoned()
            raise
        answered()
        return answer

    def of(self, tenant: str) -> CircuitBreaker:
        """The tenant's breaker; the least recently used ones are dropped beyond a bound."""
        breaker = self._breakers.get(tenant)
        if breaker is None:
            breaker = self._breakers[tenant] = CircuitBreaker()
        return breaker
