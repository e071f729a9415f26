"""Stores of idempotency-key claims: Redis, shared by all instances, and local memory."""

import asyncio
from collections.abc import Callable
from time import monotonic

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fairlane.settings import IDEMPOTENCY_TTL_S
from fairlane_server.redis.availability import RedisAvailability, RedisCaller
from fairlane_server.redis.state import (
    TENANT_COUNTER_FUNCTIONS,
    RefusedWrite,
    StateKind,
    count_refusal_of,
    count_refusals,
)
from producers.gateway.tenant_bounds import TenantMap

MOST_LOCAL_CLAIMS = 20_000

_PREFIX, _COUNTER = "idempotency:", "idempotency-count:"

# '' means no claim; a claim is never empty. Returns the claim stored now, and 'memory' or 'tenant_bound' where the new
# one could not be written.
_SWAP = (
    TENANT_COUNTER_FUNCTIONS
    + """
local there, ttl_s = redis.call('GET', KEYS[1]) or '', tonumber(ARGV[3])
if there ~= ARGV[1] or (there == '' and ARGV[2] == '') then
  return {there, ''}
end
local room = room_in(KEYS[2], tonumber(ARGV[4]), ttl_s)
if ARGV[2] == '' then
  redis.call('DEL', KEYS[1])
  room.added = -1
elseif there == '' and room.left <= 0 then
  return {there, 'tenant_bound'}
elseif not set_or_refuse(KEYS[1], ARGV[2], ttl_s) then
  return {there, 'memory'}
elseif there == '' then
  room.added = 1
end
take_room(room)
return {ARGV[2], ''}
"""
)


class LocalClaims:
    """Claims in the memory of this process. Beyond ``most``, the tenant with the most claims loses its oldest."""

    def __init__(
        self, ttl_s: float = IDEMPOTENCY_TTL_S, most: int = MOST_LOCAL_CLAIMS, clock_s: Callable[[], float] = monotonic
    ) -> None:
        self._ttl_s = ttl_s
        self._clock_s = clock_s
        self._claims: TenantMap[tuple[float, str]] = TenantMap(most)

    async def swap(self, tenant: str, name: str, expected: str | None, new: str | None) -> str | None:
        there = self.get(tenant, name)
        if there != expected:
            return there
        self.put(tenant, name, new)
        return new

    def put(self, tenant: str, name: str, claim: str | None) -> None:
        """Store the claim unconditionally; None deletes it."""
        if claim is None:
            self._claims.pop(tenant, name)
        else:
            self._claims.put(tenant, name, (self._clock_s() + self._ttl_s, claim))

    def get(self, tenant: str, name: str) -> str | None:
        """The stored claim; None if there is none or it has expired."""
        ends_at, claim = self._claims.get(tenant, name) or (0.0, None)
        if claim is not None and ends_at <= self._clock_s():
            self._claims.pop(tenant, name)
            return None
        return claim


class RedisClaims:
    """Claims shared by all instances. While Redis does not answer, this instance uses the claims it has seen itself.

    No call raises because of Redis. For one event loop.

    Args:
        redis: the client; its own timeouts apply as well.
        watch: availability of the same Redis.
        timeout_s: bound of one Redis command, in seconds; a swap runs at most two.
        most: claims that Redis keeps for one tenant at a time; further ones are known to their own instance alone.
        ttl_s: lifetime of a claim, in seconds.
    """

    def __init__(
        self,
        redis: "Redis",
        watch: RedisAvailability,
        timeout_s: float,
        most: int,
        ttl_s: int = IDEMPOTENCY_TTL_S,
    ) -> None:
        self._script = redis.register_script(_SWAP)
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._most = most
        self._turns = RedisCaller(watch, "idempotency_unavailable")
        self._seen = LocalClaims(ttl_s)
        self._own = LocalClaims(ttl_s)
        """Subset of ``_seen`` that this instance wrote: only this instance releases it."""

    async def swap(self, tenant: str, name: str, expected: str | None, new: str | None) -> str | None:
        own, seen = self._own.get(tenant, name), self._seen.get(tenant, name)
        if own is not None and expected is None:
            # Redis may have lost it, or been unavailable when it was written; it still counts here.
            return own
        there = await self._ask(tenant, name, expected, new)
        if there is None and new is not None and seen is not None and seen == expected:
            there = await self._ask(tenant, name, None, new)
        self._seen.put(tenant, name, there)
        self._own.put(tenant, name, there if there == new else None)
        return there

    async def _ask(self, tenant: str, name: str, expected: str | None, new: str | None) -> str | None:
        if not self._turns.may_ask():
            return await self._seen.swap(tenant, name, expected, new)
        try:
            async with asyncio.timeout(self._timeout_s):
                answer, refusal = await self._script(
                    keys=[_PREFIX + name, _COUNTER + tenant],
                    args=[expected or "", new or "", self._ttl_s, self._most],
                )
        except (RedisError, OSError, TimeoutError) as error:
            count_refusal_of(StateKind.IDEMPOTENCY_KEYS, error)
            self._turns.failed(error)
            return await self._seen.swap(tenant, name, expected, new)
        self._turns.succeeded()
        if refusal:
            count_refusals(StateKind.IDEMPOTENCY_KEYS, RefusedWrite(refusal.decode()))
            return await self._seen.swap(tenant, name, expected, new)
        return (answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)) or None
