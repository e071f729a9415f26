"""Cached lookups in the identity store: each name once a second, bounded, with a grace period for outages."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable
from random import random
from typing import Generic, TypeVar

from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane_server.circuit_breaker import CircuitBreaker
from fairlane_server.store_error import StoreError
from producers.gateway.tenant_bounds import TenantMap

log = get_logger(__name__)

ValueT = TypeVar("ValueT")

FRESH_MS = 1_000
"""Lifetime of a cached answer, and so how long a revoked key may still pass."""

TIMEOUT_S = 3.0
STALE_WAIT_MS = 250
"""How long a caller waits for a new answer while an older one still counts."""

MOST_REMEMBERED = 20_000
MOST_UNDER_WAY = 64
"""Lookups in flight: as many as may wait for a connection of the store's pool."""
MOST_UNKNOWN_IN_FLIGHT = 48
"""Of those, lookups of names that the store never knew: guesses must not take the slots of known names."""
MOST_STRANGERS_OF_ORIGIN = 12
"""Of those, lookups from one address or of one tenant, so that no one caller's guesses take all."""

FULL_GRACE_MS = 5_000
"""How long an answer counts while all lookup slots are taken. Shorter than the grace for a Postgres outage: a revoked
key must not pass longer because many others are looked up. Every lookup ends within this time."""


class Lookups(Generic[ValueT]):
    """Lookups of one kind, for one event loop. An answer counts for ``grace_ms`` while the store is unavailable. The
    cache evicts from the tenant with the most answers; ``tenant_of`` gives the tenant of a name that the store
    knows."""

    def __init__(
        self,
        grace_ms: int,
        clock: ClockMs,
        breaker: CircuitBreaker,
        tenant_of: Callable[[Hashable, ValueT], str] = lambda _name, _value: "",
    ) -> None:
        self._grace_ms = max(FRESH_MS, grace_ms)
        self._recent: TenantMap[tuple[ValueT, int]] = TenantMap(MOST_REMEMBERED)
        """Answers, and when the store was asked."""
        self._clock = clock
        self._breaker = breaker
        self._tenant_of = tenant_of
        self._strangers: Counter[str] = Counter()
        """Lookups in flight of names that the store never knew, by origin."""
        self._talks: dict[Hashable, tuple[asyncio.Task[ValueT | None], int]] = {}
        """Lookups in flight, with their start times."""

    def knows(self, name: Hashable) -> bool:
        """Whether the store knew this name once: presenting it is no guess."""
        return name in self._recent

    async def find(
        self, name: Hashable, ask: Callable[[], Awaitable[ValueT | None]], origin: str | None = None
    ) -> ValueT | None:
        """The result of ``ask``, shared by concurrent callers of the same name. None is not cached.

        ``origin`` is the address or tenant that lookups of names unknown to the store are counted for. ``ask`` must end
        within a timeout of its own. Raises StoreError: the store is unavailable or all slots are taken, and
        the cached answer is too old.
        """
        now_ms = self._clock()
        if (known := self._within(name, now_ms, FRESH_MS)) is not None:
            return known
        if name not in self._talks:
            is_known = name in self._recent
            counted_for = None if is_known else origin
            is_full = len(self._talks) >= (MOST_UNDER_WAY if is_known else MOST_UNKNOWN_IN_FLIGHT)
            if is_full or (counted_for is not None and self._strangers[counted_for] >= MOST_STRANGERS_OF_ORIGIN):
                return _sure(self._within(name, now_ms, min(FULL_GRACE_MS, self._grace_ms)))
            if not self._breaker.lets_through(now_ms):
                return self._in_grace(name, now_ms)
            self._begin(name, ask, now_ms, counted_for)
        talk, begun_at_ms = self._talks[name]
        known = self._within(name, now_ms, self._grace_ms)
        wait_s = None if known is None else max(0, begun_at_ms + STALE_WAIT_MS - now_ms) / 1_000
        # Cancelling one waiter does not cancel the lookup: others may wait for it.
        await asyncio.wait((talk,), timeout=wait_s)
        if not talk.done() and known is not None:
            return known
        try:
            return talk.result()
        except StoreError:
            return self._in_grace(name, self._clock())

    async def close(self) -> None:
        """Cancel lookups in flight."""
        talks = [talk for talk, _ in self._talks.values()]
        for talk in talks:
            talk.cancel()
        if talks:
            await asyncio.wait(talks)

    def _begin(
        self, name: Hashable, ask: Callable[[], Awaitable[ValueT | None]], now_ms: int, origin: str | None
    ) -> None:
        if origin is not None:
            self._strangers[origin] += 1
        talk = asyncio.create_task(self._ask(name, ask, now_ms), name="identity lookup")
        self._talks[name] = (talk, now_ms)
        talk.add_done_callback(lambda ended: self._ended(name, origin, ended))

    async def _ask(
        self, name: Hashable, ask: Callable[[], Awaitable[ValueT | None]], asked_at_ms: int
    ) -> ValueT | None:
        try:
            value = await ask()
        except StoreError as error:
            was_open = self._breaker.is_open
            self._breaker.failed(self._clock(), random())  # noqa: S311 - jitter, no secret
            if self._breaker.is_open and not was_open:
                log.warning("identity_store_unavailable", error=str(error))
            raise
        except BaseException:
            self._breaker.abandoned()
            raise
        self._breaker.succeeded()
        if value is None:
            self._recent.pop(name)
        else:
            self._recent.put(self._tenant_of(name, value), name, (value, asked_at_ms))
        return value

    def _ended(self, name: Hashable, origin: str | None, talk: "asyncio.Task[ValueT | None]") -> None:
        self._talks.pop(name, None)
        if origin is not None:
            self._strangers[origin] -= 1
            if not self._strangers[origin]:
                del self._strangers[origin]
        if not talk.cancelled():
            talk.exception()  # retrieved, so that asyncio does not warn that it never was

    def _within(self, name: Hashable, now_ms: int, span_ms: int) -> ValueT | None:
        """The cached answer, if the store was asked less than ``span_ms`` ago."""
        known = self._recent.get(name)
        return known[0] if known is not None and now_ms - known[1] < span_ms else None

    def _in_grace(self, name: Hashable, now_ms: int) -> ValueT:
        return _sure(self._within(name, now_ms, self._grace_ms))


def _sure(known: ValueT | None) -> ValueT:
    if known is None:
        raise StoreError("the store of identities cannot be asked")
    return known
