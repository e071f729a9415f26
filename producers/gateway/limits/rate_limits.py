"""Rate limits of a caller: its key, its user and its tenant; in memory, and in Redis for all instances."""

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from math import ceil

from redis.asyncio import Redis
from redis.exceptions import RedisError

from fairlane import metrics
from fairlane.clock import ClockMs
from fairlane.logs import get_logger
from fairlane_server.redis.availability import RedisAvailability, RedisCaller
from fairlane_server.redis.keys import KeyFamily, redis_key
from fairlane_server.redis.state import StateKind, count_refusal_of
from fairlane_server.token_bucket import BUCKET_FUNCTIONS, LONGEST_WAIT_MS
from producers.gateway.identity.identity import Identity
from producers.gateway.limits.rate_buckets import Allowance, RatePolicy, TokenBuckets, allowance
from producers.openai_api.errors import GatewayError

log = get_logger(__name__)

MOST_CALLS = 256
"""Calls in one command."""

PACE_S = 0.004
"""Minimum interval between the starts of two commands."""

# RateBook in Lua, for several calls in order.
# Arguments: the time, empty for the server's clock; the capacity; the refill per millisecond; the longest time to
# report; for each call the number of its buckets and the indexes of their keys.
# Returns for each call: the amount in its emptiest bucket; milliseconds until all are full; milliseconds until the call
# would be granted. One text for all: Redis does not truncate numbers in a text, and parsing it costs the event loop a
# fraction of a list. A key expires when its bucket is full.
_SCRIPT = (
    BUCKET_FUNCTIONS
    + """
local now, capacity, per_ms, most_ms = clock(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local buckets = {}
for i, key in ipairs(KEYS) do
  local stored = redis.call('HMGET', key, 'calls', 'at_ms')
  local since = tonumber(stored[2]) or now
  local at = math.max(now, since)
  buckets[i] = {at = at, amount = refilled(capacity, per_ms, tonumber(stored[1]) or capacity, at - since)}
end
local answers, next_arg = {}, 5
while next_arg <= #ARGV do
  local first, last = next_arg + 1, next_arg + tonumber(ARGV[next_arg])
  next_arg = last + 1
  local longest, least, full_ms = 0, math.huge, 0
  for a = first, last do
    local bucket = buckets[tonumber(ARGV[a])]
    longest = math.max(longest, wait_ms(capacity, per_ms, 1 - bucket.amount, bucket.at - now))
  end
  for a = first, last do
    local bucket = buckets[tonumber(ARGV[a])]
    if longest == 0 then
      bucket.amount, bucket.changed = bucket.amount - 1, true
    end
    least = math.min(least, bucket.amount)
    full_ms = math.max(full_ms, bucket.at - now + full_in_ms(capacity, per_ms, bucket.amount))
  end
  full_ms, longest = math.min(full_ms, most_ms), math.min(longest, most_ms)
  answers[#answers + 1] = string.format('%.17g %.0f %.0f', least, full_ms, longest)
end
for i, key in ipairs(KEYS) do
  local bucket = buckets[i]
  if bucket.changed then
    local full_ms = bucket.at - now + full_in_ms(capacity, per_ms, bucket.amount)
    redis.call('HSET', key, 'calls', string.format('%.17g', bucket.amount), 'at_ms', string.format('%.0f', bucket.at))
    redis.call('PEXPIRE', key, string.format('%.0f', math.max(1, math.min(full_ms, most_ms))))
  end
end
return table.concat(answers, ' ')
"""
)


class LocalRateLimits:
    """In memory: exact for the calls of this process, lost when it ends."""

    def __init__(self, clock: ClockMs) -> None:
        self._clock = clock
        self._book = TokenBuckets()

    async def take(self, owners: Sequence[str], policy: RatePolicy) -> Allowance:
        """Take one call from the bucket of each owner (at least one, none twice), from all of them or from none."""
        return self._book.take(owners, policy, self._clock())


@dataclass(frozen=True, slots=True)
class _Call:
    """A call waiting for its answer; None if Redis gave none."""

    owners: Sequence[str]
    policy: RatePolicy
    answer: "asyncio.Future[Allowance | None]"


class RedisRateLimits:
    """Buckets in Redis, with at most one round trip per call, and none while Redis does not answer. Calls that arrive
    within ``PACE_S`` of the start of a command share the next: a command costs the event loop a quarter of a call.

    While Redis fails or hangs, ``local`` decides, with the whole limit at each instance: over any interval a caller
    gets at most the grants of Redis plus those of every instance. An emptied Redis starts with full buckets. For one
    event loop.

    ``timeout_s`` bounds a command, connecting included, and so the delay of a call before any work. ``clock`` replaces
    the server's clock, in tests.
    """

    def __init__(
        self,
        redis: "Redis",
        local: LocalRateLimits,
        watch: RedisAvailability,
        timeout_s: float,
        clock: ClockMs | None = None,
    ) -> None:
        self._run = redis.register_script(_SCRIPT)
        self._local = local
        self._clock = clock
        self._timeout_s = timeout_s
        self._turns = RedisCaller(watch, "rate_limits_unavailable")
        self._waiting: deque[_Call] = deque()
        self._asking: asyncio.Task[None] | None = None
        self._asked_at_s = -PACE_S

    @property
    def available(self) -> bool:
        """Whether Redis answered the last ``take``."""
        return self._turns.answered

    async def take(self, owners: Sequence[str], policy: RatePolicy) -> Allowance:
        """As ``LocalRateLimits.take``."""
        if not self._turns.may_ask():
            return await self._local.take(owners, policy)
        call = _Call(owners, policy, asyncio.get_running_loop().create_future())
        self._waiting.append(call)
        # An answered caller may call again before the callback of the finished task has run.
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_for_all(), name="rate limits")
            self._asking.add_done_callback(self._ended)
        found = await call.answer
        return await self._local.take(owners, policy) if found is None else found

    async def _ask_for_all(self) -> None:
        now_s = asyncio.get_running_loop().time
        while self._waiting:
            if (rest_s := self._asked_at_s + PACE_S - now_s()) > 0:
                await asyncio.sleep(rest_s)
            self._asked_at_s = now_s()
            calls = self._next_calls()
            # Calls queued behind a failed command do not wait for another.
            answers = await self._ask(calls) if self._turns.may_ask() else None
            for number, call in enumerate(calls):
                if not call.answer.done():
                    call.answer.set_result(None if answers is None else answers[number])

    def _ended(self, asking: "asyncio.Task[None]") -> None:
        if not asking.cancelled() and (error := asking.exception()) is not None:
            log.error("rate_limits_failed", kind=type(error).__name__)
        if self._asking is not asking:
            return
        self._asking = None
        # However the task ended, no call may wait for ever.
        while self._waiting:
            _give_up(self._waiting.popleft())

    def _next_calls(self) -> list[_Call]:
        """Calls of one policy from the front of the queue, without cancelled ones."""
        calls: list[_Call] = []
        while self._waiting and len(calls) < MOST_CALLS:
            if self._waiting[0].answer.done():
                self._waiting.popleft()
            elif not calls or self._waiting[0].policy == calls[0].policy:
                calls.append(self._waiting.popleft())
            else:
                break
        return calls

    async def _ask(self, calls: Sequence[_Call]) -> list[Allowance] | None:
        """The answers of Redis, in order; None if it does not answer."""
        if not calls:
            return None
        policy = calls[0].policy
        numbers: dict[str, int] = {}
        now = "" if self._clock is None else self._clock()
        args: list[str | int | float] = [now, policy.burst, policy.per_ms, LONGEST_WAIT_MS]
        for call in calls:
            args.append(len(call.owners))
            args += [numbers.setdefault(owner, len(numbers) + 1) for owner in call.owners]
        try:
            async with asyncio.timeout(self._timeout_s):
                keys = [redis_key(KeyFamily.CALLS, owner) for owner in numbers]
                found = (await self._run(keys=keys, args=args)).split()
            rows = zip(found[::3], found[1::3], found[2::3], strict=True)
            answers = [allowance(policy, float(least), int(full_ms), int(wait)) for least, full_ms, wait in rows]
        except (RedisError, OSError, TimeoutError) as error:
            count_refusal_of(StateKind.RATE_LIMITS, error)
            self._turns.failed(error)
            return None
        except BaseException:
            for call in calls:
                _give_up(call)
            raise
        self._turns.succeeded()
        return answers


def _give_up(call: _Call) -> None:
    if not call.answer.done():
        call.answer.set_result(None)


RATE_LIMITED = "rate_limit_exceeded"
_MS_PER_S, _MS_PER_MINUTE, _MS_PER_HOUR = 1_000, 60_000, 3_600_000


class CallLimits:
    """Every key and every user has a token bucket; a call takes from both of its caller, or from none. A granted call
    then takes from its tenant's bucket, so that many users do not multiply a tenant's rate. The tenants' buckets are
    local: they protect this process, and cost no round trip."""

    def __init__(
        self, limits: LocalRateLimits | RedisRateLimits, policy: RatePolicy, tenant_policy: RatePolicy, clock: ClockMs
    ) -> None:
        self._limits = limits
        self._policy = policy
        self._tenant_policy = tenant_policy
        self._tenants = TokenBuckets()
        self._clock = clock

    async def take(self, identity: Identity) -> Allowance:
        """Take one call of this caller."""
        found = await self._limits.take(owners_of(identity), self._policy)
        if found.is_granted:
            of_tenant = self._tenants.take([identity.tenant], self._tenant_policy, self._clock())
            if not of_tenant.is_granted or of_tenant.remaining < found.remaining:
                found = of_tenant
        if not found.is_granted:
            metrics.CALLS_LIMITED.labels(tenant=identity.tenant).inc()
        return found


def owners_of(identity: Identity) -> tuple[str, ...]:
    """Names of the caller's buckets of key and user."""
    if identity.user is None:
        return (f"key:{identity.subject}",)
    # A digest: a subject may be any text of any length.
    user = f"user:{identity.tenant}:{sha256(identity.user.encode()).hexdigest()}"
    return (user,) if identity.user == identity.subject else (f"key:{identity.subject}", user)


def refusal(allowance: Allowance) -> GatewayError:
    """The error for a caller over its rate."""
    return GatewayError(
        429,
        RATE_LIMITED,
        "Too many calls with this key, of this user or of this tenant.",
        retry_after_ms=allowance.retry_after_ms,
    )


def headers_of(allowance: Allowance) -> dict[str, str]:
    """The headers of OpenAI's API, by the same names."""
    return {
        "x-ratelimit-limit-requests": str(allowance.limit),
        "x-ratelimit-remaining-requests": str(allowance.remaining),
        "x-ratelimit-reset-requests": span_text(allowance.reset_ms),
    }


def span_text(span_ms: int) -> str:
    """A duration as ``12ms``, ``3s``, ``6m0s``, ``1h2m3s``: from one second on, whole seconds rounded up."""
    if span_ms < _MS_PER_S:
        return f"{span_ms}ms"
    span_ms = ceil(span_ms / _MS_PER_S) * _MS_PER_S
    hours, rest = divmod(span_ms, _MS_PER_HOUR)
    minutes, rest = divmod(rest, _MS_PER_MINUTE)
    text = f"{hours}h" if hours else ""
    text += f"{minutes}m" if hours or minutes else ""
    return f"{text}{rest // _MS_PER_S}s"
