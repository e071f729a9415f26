"""Fleet-wide quotas in Redis, with local quotas while Redis is unavailable."""

import asyncio
from collections.abc import Sequence

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane.records import SourceCoordinate
from fairlane_server.redis.availability import RedisAvailability, RedisCaller
from fairlane_server.redis.keys import KeyFamily, redis_key
from fairlane_server.redis.state import StateKind, count_refusal_of
from fairlane_server.token_bucket import BUCKET_FUNCTIONS, LONGEST_WAIT_MS
from stream_processors.dispatcher.admission.quotas import (
    Charge,
    Exceeded,
    Quota,
    Quotas,
    buckets_of,
    has_quotas,
)

log = get_logger(__name__)

_TIMEOUT_S = 0.25
_QUOTAS = tuple(Quota)

_CLOCKS_APART_MS = 60_000
"""Bound on the clock skew between brokers, dispatchers and Redis."""

# QuotaBook in Lua, for a whole batch in one command.
# ARGV: -1 to take or 1 to give back; the time in ms, empty for the server's clock, which all dispatchers share; the
# longest wait returned, up to which a wait is a whole number to Redis as well; the number of tenants' keys, which come
# first in KEYS; per tenant the capacity and the refill per millisecond of each quota, in the order of Quota, with a
# capacity below 0 for a quota that the tenant does not have; per charge the number of its tenant's key, its tokens, the
# number of its record's key or 0, and the time until which that key is stored.
# Returns: per charge the number of the quota that refuses it and the milliseconds until it would not; 0 and 0 when
# granted, -1 milliseconds for never.
# A record's key holds the tokens granted to the record: while it exists the record is charged nothing more, and exactly
# these tokens are given back. A tenant's key is deleted when all its buckets are full.
_SCRIPT = (
    BUCKET_FUNCTIONS
    + """
local sign = tonumber(ARGV[1])
local now = clock(ARGV[2])
local most_ms = tonumber(ARGV[3])
local tenant_keys = tonumber(ARGV[4])
local next_arg = 5
local tenants = {}
for i = 1, tenant_keys do
  local key = KEYS[i]
  local stored = redis.call('HMGET', key, 'requests_per_s', 'tokens_per_minute', 'tokens_per_day', 'at_ms')
  local since = tonumber(stored[4]) or now
  local tenant = {at = math.max(now, since), stored = stored, changed = false}
  for j = 1, 3 do
    local capacity, per_ms = tonumber(ARGV[next_arg]), tonumber(ARGV[next_arg + 1])
    next_arg = next_arg + 2
    local amount = tonumber(stored[j]) or capacity
    amount = refilled(capacity, per_ms, amount, tenant.at - since)
    tenant[j] = {capacity = capacity, per_ms = per_ms, amount = amount}
  end
  tenants[i] = tenant
end
local answers = {}
for a = next_arg, #ARGV, 4 do
  local tenant, tokens = tenants[tonumber(ARGV[a])], tonumber(ARGV[a + 1])
  local record = KEYS[tonumber(ARGV[a + 2])]
  local granted = record and redis.call('GET', record)
  local which, longest = 0, 0
  if sign > 0 and granted then
    tokens = tonumber(granted) or tokens
  end
  for j, bucket in ipairs(tenant) do
    bucket.wanted = j == 1 and 1 or tokens
    local wait = 0
    if bucket.capacity >= 0 and sign < 0 and not granted then
      if bucket.wanted > bucket.capacity then
        wait = math.huge
      else
        wait = wait_ms(bucket.capacity, bucket.per_ms, bucket.wanted - bucket.amount, tenant.at - now)
      end
    end
    if wait > longest then
      which, longest = j, wait
    end
  end
  if which == 0 and (not record or (sign > 0) == (granted ~= false)) then
    tenant.changed = true
    for j, bucket in ipairs(tenant) do
      bucket.amount = math.min(bucket.capacity, bucket.amount + sign * bucket.wanted)
    end
    if granted then
      redis.call('DEL', record)
    elseif record then
      redis.call('SET', record, ARGV[a + 1], 'PX', string.format('%.0f', math.max(1, ARGV[a + 3] - now)))
    end
  end
  answers[#answers + 1] = which
  answers[#answers + 1] = longest == math.huge and -1 or math.min(longest, most_ms)
end
for i = 1, tenant_keys do
  local key, tenant = KEYS[i], tenants[i]
  if tenant.changed then
    local missing_for = 0
    local fields = {'at_ms', string.format('%.0f', tenant.at)}
    for j, name in ipairs({'requests_per_s', 'tokens_per_minute', 'tokens_per_day'}) do
      local bucket = tenant[j]
      if bucket.capacity >= 0 then
        fields[#fields + 1] = name
        fields[#fields + 1] = string.format('%.17g', bucket.amount)
        missing_for = math.max(missing_for, full_in_ms(bucket.capacity, bucket.per_ms, bucket.amount))
      elseif tenant.stored[j] then
        redis.call('HDEL', key, name)
      end
    end
    if missing_for == 0 then
      redis.call('DEL', key)
    else
      redis.call('HSET', key, unpack(fields))
      redis.call('PEXPIRE', key, string.format('%.0f', tenant.at - now + math.min(missing_for, most_ms)))
    end
  end
end
return answers
"""
)


class RedisQuotas:
    """One round trip per call, none for tenants without quotas or while Redis is unavailable.

    While Redis fails or hangs, ``local`` decides: over any interval a tenant then gets at most the grants of Redis plus
    those of the dispatchers' local quotas. An emptied Redis starts with full buckets.

    A granted record is charged nothing more until its deadline, even if it is asked again after a crash or a rebalance:
    each such record has a key of about 110 bytes until then, unless it is given back.

    Args:
        redis: the client; its own timeouts apply as well.
        local: decides without Redis.
        watch: availability of the same Redis.
        clock: replaces the server's clock, in tests.
        timeout_s: the longest wait of a call for Redis, connecting included.
    """

    def __init__(
        self,
        redis: "Redis",
        local: Quotas,
        watch: RedisAvailability,
        clock: ClockMs | None = None,
        timeout_s: float = _TIMEOUT_S,
    ) -> None:
        self._run = redis.register_script(_SCRIPT)
        self._local = local
        self._clock = clock
        self._timeout_s = timeout_s
        self._watch = watch
        self._turns = RedisCaller(watch, "quotas_unavailable")

    @property
    def available(self) -> bool:
        """Whether Redis answered the last ``take``."""
        return self._turns.answered

    async def take(self, charges: Sequence[Charge]) -> list[Exceeded | None]:
        answers: list[Exceeded | None] = [None] * len(charges)
        limited = [index for index, charge in enumerate(charges) if has_quotas(charge.spec)]
        if limited:
            found = await self._take([charges[index] for index in limited])
            for index, answer in zip(limited, found, strict=True):
                answers[index] = answer
        return answers

    async def _take(self, charges: Sequence[Charge]) -> list[Exceeded | None]:
        if not self._turns.may_ask():
            return await self._local.take(charges)
        try:
            numbers = await self._call(charges, -1)
        except (RedisError, OSError, TimeoutError) as error:
            count_refusal_of(StateKind.QUOTAS, error)
            self._turns.failed(error)
            return await self._local.take(charges)
        self._turns.succeeded()
        return [_answer(which, wait_ms) for which, wait_ms in zip(numbers[::2], numbers[1::2], strict=True)]

    async def give_back(self, charges: Sequence[Charge]) -> None:
        limited = [charge for charge in charges if has_quotas(charge.spec)]
        if not limited:
            return
        if not self.available:
            # The last ``take`` was answered locally, so the local quotas granted these.
            await self._local.give_back(limited)
            return
        if not self._watch.is_up:
            _lost(limited, self._watch.error)
            return
        try:
            await self._call(limited, 1)
        except (RedisError, OSError, TimeoutError) as error:
            # Do not mark the turns as failed: Redis granted last, and only a failed ``take`` switches to local.
            count_refusal_of(StateKind.QUOTAS, error)
            self._watch.failed(error)
            _lost(limited, type(error).__name__)

    async def hand_over(self, charges: Sequence[Charge]) -> None:
        # Redis stores the grants of these records for the next owner.
        if not self.available:
            await self._local.hand_over([charge for charge in charges if has_quotas(charge.spec)])

    async def _call(self, charges: Sequence[Charge], sign: int) -> list[int]:
        specs = {charge.tenant: charge.spec for charge in charges}
        args: list[str | int | float] = [
            sign,
            "" if self._clock is None else self._clock(),
            LONGEST_WAIT_MS,
            len(specs),
        ]
        for spec in specs.values():
            buckets = {bucket.quota: bucket for bucket in buckets_of(spec)}
            for quota in _QUOTAS:
                bucket = buckets.get(quota)
                args += (-1, 0) if bucket is None else (bucket.capacity, bucket.per_ms)
        numbers = {tenant: number for number, tenant in enumerate(specs, 1)}
        keys = [redis_key(KeyFamily.QUOTAS, tenant) for tenant in specs]
        for charge in charges:
            number = 0
            if charge.record is not None:
                keys.append(_key(charge.tenant, charge.record))
                number = len(keys)
            args += (numbers[charge.tenant], max(0, charge.tokens), number, charge.until_ms + _CLOCKS_APART_MS)
        async with asyncio.timeout(self._timeout_s):
            answer: list[int] = await self._run(keys=keys, args=args)
        return answer


def _lost(charges: Sequence[Charge], error: str) -> None:
    """Log a lost refund; the tenant waits a little longer."""
    log.warning("quotas_not_given_back", error=error, requests=len(charges))


def _key(tenant: str, record: SourceCoordinate) -> str:
    return redis_key(KeyFamily.GRANTS, tenant, f"{record.topic}|{record.partition}|{record.offset}")


def _answer(which: int, wait_ms: int) -> Exceeded | None:
    if not which:
        return None
    return Exceeded(_QUOTAS[which - 1], None if wait_ms < 0 else wait_ms)
