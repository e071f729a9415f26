"""The Redis for state: refused writes, bounds per tenant, and settings under which it could lose data."""

import asyncio
from collections.abc import Mapping
from enum import StrEnum
from random import random
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoPermissionError, OutOfMemoryError, ReadOnlyError, RedisError, ResponseError

from fairlane import metrics
from fairlane.logs import get_logger

log = get_logger(__name__)

_EVERY_S = 15.0
_TIMEOUT_S = 2.0

TENANT_COUNTER_FUNCTIONS = """
local function room_in(key, most, ttl_s)
  local span_s = math.ceil(ttl_s / 24)
  local span = math.floor(tonumber(redis.call('TIME')[1]) / span_s)
  local room = {key = key, span = span, ttl_s = ttl_s + span_s, left = most, added = 0, old = {}}
  local counted = redis.call('HGETALL', key)
  for i = 1, #counted, 2 do
    if tonumber(counted[i]) < span - 24 then
      room.old[#room.old + 1] = counted[i]
    else
      room.left = room.left - tonumber(counted[i + 1])
    end
  end
  return room
end
local function take_room(room)
  if room.added ~= 0 then
    redis.call('HINCRBY', room.key, room.span, room.added)
    redis.call('EXPIRE', room.key, room.ttl_s)
    if #room.old > 0 then
      redis.call('HDEL', room.key, unpack(room.old))
    end
  end
end
local function set_or_refuse(key, value, ttl_s)
  local done = redis.pcall('SET', key, value, 'EX', ttl_s)
  if not done.err then
    return true
  end
  if string.find(done.err, 'OOM', 1, true) then
    return false
  end
  error(done.err)
end
"""
"""Lua functions for scripts that set keys with a TTL and count them per tenant.

``room_in`` reads a tenant's counter: a hash with one count for each of the last 24 parts of the TTL. The script adds to
``added`` the keys it set, less those it deleted, and calls ``take_room`` after its first write: for lack of memory
Redis refuses only the first write of a script. ``set_or_refuse`` returns whether there was memory.
"""


class StateKind(StrEnum):
    """Kind of state that is kept."""

    SEEN_IDS = "seen_ids"
    IDEMPOTENCY_KEYS = "idempotency_keys"
    QUOTAS = "quotas"
    RATE_LIMITS = "rate_limits"
    SESSIONS = "sessions"


class RefusedWrite(StrEnum):
    """Why a write was refused."""

    MEMORY = "memory"
    NOT_WRITABLE = "not_writable"
    NOT_PERMITTED = "not_permitted"
    TENANT_BOUND = "tenant_bound"


def refusal_of(error: Exception) -> RefusedWrite | None:
    """Why Redis refused a write while it answers reads; None for any other error."""
    if isinstance(error, OutOfMemoryError) or (isinstance(error, ResponseError) and "OOM command" in str(error)):
        return RefusedWrite.MEMORY
    if isinstance(error, ReadOnlyError) or (isinstance(error, ResponseError) and "MISCONF" in str(error)):
        return RefusedWrite.NOT_WRITABLE
    if isinstance(error, NoPermissionError):
        return RefusedWrite.NOT_PERMITTED
    return None


def count_refusal_of(kind: StateKind, error: Exception) -> None:
    if (refusal := refusal_of(error)) is not None:
        count_refusals(kind, refusal)


def count_refusals(kind: StateKind, refusal: RefusedWrite, writes: int = 1) -> None:
    if writes:
        metrics.REDIS_REFUSED_WRITES.labels(kind=kind, reason=refusal).inc(writes)


def why_unsafe(info: Mapping[str, Any]) -> list[str]:
    """Settings in the server's INFO that let it lose state; empty when there are none."""
    reasons = []
    policy = info.get("maxmemory_policy")
    if policy not in {None, "noeviction"}:
        reasons.append(f"maxmemory-policy is {policy}, not noeviction")
    if info.get("aof_enabled") == 0:
        reasons.append("appendonly is no")
    return reasons


async def report_state(redis: "Redis") -> None:
    """Publish the server's state as metrics, forever. Ends only by cancellation."""
    said: list[str] = []
    while True:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                reasons = _show(await redis.info())
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            log.debug("redis_state_unknown", error=type(error).__name__)
        else:
            if reasons and reasons != said:
                log.error("redis_state_unsafe", reasons=reasons)
            said = reasons
        await asyncio.sleep(_EVERY_S * (0.5 + random()))  # noqa: S311 - jitter, no secret


def _show(info: Mapping[str, Any]) -> list[str]:
    most_bytes = int(info.get("maxmemory", 0))
    metrics.REDIS_STATE_EVICTED.set(int(info.get("evicted_keys", 0)))
    metrics.REDIS_STATE_MEMORY_SHARE.set(int(info.get("used_memory", 0)) / most_bytes if most_bytes else 0.0)
    reasons = why_unsafe(info)
    metrics.REDIS_STATE_UNSAFE.set(len(reasons))
    return reasons
