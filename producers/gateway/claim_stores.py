"""Where claims of idempotency keys are kept: in Redis for all instances, or in this process alone."""

import asyncio
from collections.abc import Callable
from time import monotonic

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fairlane.settings import IDEMPOTENCY_TTL_S
from fairlane_server.redis.availability import RedisTurns, RedisWatch
from fairlane_server.redis.state import TENANT_ROOM, Kind, Refusal, count_refusal_of, count_refusals
from producers.gateway.tenant_map import TenantMap

MOST_LOCAL_CLAIMS = 20_000

_PREFIX, _COUNTER = "idempotency:", "idempotency-count:"

# '' stands for nothing: no claim is empty. Answered: what is there now; and 'memory' or 'tenant_bound' where the new
# claim could not be written.
_SWAP = (
    TENANT_ROOM
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
    """Claims of this process, gone with it. Of too many the oldest is forgotten of the tenant that has most.

    Args:
        ttl_s: how long each is kept, in seconds.
        most: bound of their number.
        clock_s: monotonic seconds.
    """

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
        """Whatever is there."""
        if claim is None:
            self._claims.pop(tenant, name)
        else:
            self._claims.put(tenant, name, (self._clock_s() + self._ttl_s, claim))

    def get(self, tenant: str, name: str) -> str | None:
        """What is there."""
        ends_at, claim = self._claims.get(tenant, name) or (0.0, None)
        if claim is not None and ends_at <= self._clock_s():
            self._claims.pop(tenant, name)
            return None
        return claim


class RedisClaims:
    """Claims that all instances share. While Redis does not answer, this instance goes by what it has seen itself.

    No call raises because of Redis, and none waits longer than its time-out. On one event loop.

    Args:
        redis: the client; its own time-outs apply as well.
        watch: of the same Redis.
        timeout_s: the longest a call waits, in seconds.
        most: claims of one tenant that Redis keeps at a time; what is beyond is known to its own instance alone.
        ttl_s: how long each is kept, in seconds.
    """

    def __init__(
        self,
        redis: "Redis",
        watch: RedisWatch,
        timeout_s: float,
        most: int,
        ttl_s: int = IDEMPOTENCY_TTL_S,
    ) -> None:
        self._script = redis.register_script(_SWAP)
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._most = most
        self._turns = RedisTurns(watch, "idempotency_unavailable")
        self._seen = LocalClaims(ttl_s)
        self._own = LocalClaims(ttl_s)
        """What of that this instance wrote: nobody else gives it back."""

    async def swap(self, tenant: str, name: str, expected: str | None, new: str | None) -> str | None:
        own, seen = self._own.get(tenant, name), self._seen.get(tenant, name)
        if own is not None and expected is None:
            # What Redis lost, or was not there to be told, still counts here.
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
            count_refusal_of(Kind.IDEMPOTENCY_KEYS, error)
            self._turns.failed(error)
            return await self._seen.swap(tenant, name, expected, new)
        self._turns.succeeded()
        if refusal:
            count_refusals(Kind.IDEMPOTENCY_KEYS, Refusal(refusal.decode()))
            return await self._seen.swap(tenant, name, expected, new)
        return (answer.decode(errors="replace") if isinstance(answer, bytes) else str(answer)) or None
