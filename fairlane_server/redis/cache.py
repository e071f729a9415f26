"""Sealed cache entries in Redis; they may be missing, late, or written by others."""

import asyncio
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import random
from time import monotonic
from typing import Any, Generic, TypeVar, cast

from redis.asyncio import Redis
from redis.exceptions import RedisError, ResponseError

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.logs import get_logger
from fairlane_server.caching.entries import MOST_ENTRY_BYTES, CacheKey, jittered_ttl_ms, seal, unseal
from fairlane_server.circuit_breaker import BreakerPolicy, CircuitBreaker

log = get_logger(__name__)

ValueT = TypeVar("ValueT")

TIMEOUT_S = 0.02
"""Short compared with the budget of the retrieval that follows."""

ANSWER_TIMEOUT_S = 0.1
"""For cached answers: a miss costs an engine run."""

MOST_ROW_BYTES = 16_384
"""Largest entry of a list; entries under a key of their own are bounded by ``most_entry_bytes``."""

_MOST_CALLS = 32
_MOST_WRITES = 256
# One late call may be due to a busy event loop. A hung Redis costs three consecutive calls their timeout and then one
# call per rest.
_BREAKER = BreakerPolicy(failures=3, rest=Backoff(first_s=0.5, longest_s=2.0))

# Oversized rows are returned empty. One reply of length-prefixed rows: one reply per row costs the event loop several
# times as much.
_ROWS = """
local rows = {}
for i, row in ipairs(redis.call('LRANGE', KEYS[1], 0, ARGV[1] - 1)) do
  if #row > tonumber(ARGV[2]) then
    row = ''
  end
  rows[i] = struct.pack('>I4', #row) .. row
end
return table.concat(rows)
"""
_ROW_LENGTH = struct.Struct(">I")

# One reply for all keys, for the same reason.
_SET_ALL = """
for i, key in ipairs(KEYS) do
  redis.call('SET', key, ARGV[2 * i - 1], 'PX', ARGV[2 * i])
end
return #KEYS
"""

_ADD_ROW = """
redis.call('LPUSH', KEYS[1], ARGV[1])
redis.call('LTRIM', KEYS[1], 0, ARGV[2] - 1)
redis.call('PEXPIRE', KEYS[1], ARGV[3])
return 1
"""


class LookUpResult(StrEnum):
    """Result of a look-up; also the label of its metric."""

    HIT = "hit"
    MISS = "miss"
    POISONED = "poisoned"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class LookUp(Generic[ValueT]):
    """A look-up; ``value`` is set for a hit only."""

    result: LookUpResult
    value: ValueT | None = None


class RedisCache:
    """Cache in Redis. No call raises because of Redis or its content, none exceeds its timeout. For one event loop.

    Args:
        redis: the client; its own timeouts apply as well. None disables the cache.
        ttl_s: longest life of an entry, in seconds.
        timeout_s: longest duration of a call, in seconds, including the wait for a slot and a connection.
        clock_s: monotonic seconds.
        most_entry_bytes: larger entries are neither written nor read.
    """

    def __init__(
        self,
        redis: "Redis | None",
        ttl_s: float,
        timeout_s: float = TIMEOUT_S,
        clock_s: Callable[[], float] = monotonic,
        most_entry_bytes: int = MOST_ENTRY_BYTES,
    ) -> None:
        self._redis = redis
        self._ttl_s = ttl_s
        self._most_entry_bytes = most_entry_bytes
        self._timeout_s = timeout_s
        self._clock_s = clock_s
        self._breaker = CircuitBreaker(_BREAKER)
        self._turns = asyncio.Semaphore(_MOST_CALLS)
        self._writes: set[asyncio.Task[None]] = set()
        if redis is not None:
            self._rows = redis.register_script(_ROWS)
            self._add_row = redis.register_script(_ADD_ROW)
            self._set_all = redis.register_script(_SET_ALL)

    @property
    def is_available(self) -> bool:
        return self._redis is not None and not self._breaker.is_open

    async def look_up(self, key: CacheKey, decode: Callable[[bytes], ValueT | None]) -> LookUp[ValueT]:
        """Read the entry under this key and verify that it was sealed for it. Not counted, unlike ``get``. ``decode``
        returns None for an invalid payload."""
        redis = self._redis
        if redis is None:
            return LookUp(LookUpResult.UNAVAILABLE)
        # One byte more than allowed is enough to detect an oversized entry.
        answer = await self._ask(lambda: cast(Awaitable[object], redis.getrange(key.name, 0, self._most_entry_bytes)))
        if isinstance(answer, LookUpResult):
            return LookUp(answer)
        if not answer:
            return LookUp(LookUpResult.MISS)
        payload = unseal(key, answer, self._most_entry_bytes) if isinstance(answer, bytes) else None
        value = None if payload is None else decode(payload)
        return LookUp(LookUpResult.POISONED) if value is None else LookUp(LookUpResult.HIT, value)

    async def get(self, key: CacheKey, decode: Callable[[bytes], ValueT | None]) -> ValueT | None:
        """``look_up``, counted; None for everything but a hit."""
        looked = await self.look_up(key, decode)
        count(key.cache, looked.result)
        return looked.value

    async def put(self, key: CacheKey, payload: bytes) -> bool:
        """Store the payload for the TTL. Returns whether it was stored."""
        entry = seal(key, payload, self._most_entry_bytes)
        redis = self._redis
        if entry is None or redis is None:
            return _wrote(key, "unavailable" if redis is None else "too_large")
        ttl_ms = jittered_ttl_ms(self._ttl_s, random())  # noqa: S311 - jitter, no secret
        answer = await self._ask(lambda: cast(Awaitable[object], redis.set(key.name, entry, px=ttl_ms)))
        return _wrote(key, "unavailable" if isinstance(answer, LookUpResult) else "stored")

    async def put_all(self, entries: Sequence[tuple[CacheKey, bytes]]) -> None:
        """Store these payloads in one round trip and count each; all that fit the size limit succeed or fail
        together."""
        sealed = [(key, seal(key, payload, self._most_entry_bytes)) for key, payload in entries]
        fitting = [(key, entry) for key, entry in sealed if entry is not None]
        for key, entry in sealed:
            if entry is None:
                _wrote(key, "too_large")
        if not fitting:
            return
        answer: object = LookUpResult.UNAVAILABLE
        if self._redis is not None:
            names = [key.name for key, _ in fitting]
            args: list[bytes | int] = []
            for _, entry in fitting:
                args += (entry, jittered_ttl_ms(self._ttl_s, random()))  # noqa: S311 - jitter, no secret
            answer = await self._ask(lambda: self._set_all(keys=names, args=args))
        result = "unavailable" if isinstance(answer, LookUpResult) else "stored"
        for name, written in Counter(key.cache for key, _ in fitting).items():
            metrics.CACHE_WRITES.labels(cache=name, result=result).inc(written)

    async def rows(self, key: CacheKey, most: int) -> LookUpResult | list[bytes | None]:
        """Payloads of a list's newest rows, newest first; None for a row that was not sealed for this key. A missing
        list is a miss."""
        if self._redis is None:
            return LookUpResult.UNAVAILABLE
        answer = await self._ask(lambda: self._rows(keys=[key.name], args=[most, MOST_ROW_BYTES]))
        if isinstance(answer, LookUpResult):
            return answer
        if not isinstance(answer, bytes):
            return LookUpResult.POISONED
        return [unseal(key, row, MOST_ROW_BYTES) for row in _split(answer)] or LookUpResult.MISS

    async def add_row(self, key: CacheKey, payload: bytes, most: int) -> bool:
        """Prepend a row to a list that keeps its ``most`` newest rows. Returns whether it was stored."""
        row = seal(key, payload, MOST_ROW_BYTES)
        if row is None or self._redis is None:
            return _wrote(key, "too_large" if row is None else "unavailable")
        # The full TTL: no entry that a row refers to lives longer.
        args: list[bytes | int] = [row, most, jittered_ttl_ms(self._ttl_s, 0.0)]
        answer = await self._ask(lambda: self._add_row(keys=[key.name], args=args))
        return _wrote(key, "unavailable" if isinstance(answer, LookUpResult) else "stored")

    async def forget(self, keys: Sequence[CacheKey]) -> bool:
        """Delete entries. Returns False if Redis does not answer: they may be there until they expire."""
        redis = self._redis
        if redis is None or not keys:
            return True
        names = [key.name for key in keys]
        return not isinstance(await self._ask(lambda: redis.delete(*names)), LookUpResult)

    def soon(self, key: CacheKey, write: Callable[[], Coroutine[Any, Any, bool]]) -> None:
        """Write in the background; dropped when too many writes are running."""
        if len(self._writes) >= _MOST_WRITES:
            _wrote(key, "dropped")
            return

        async def run() -> None:
            await write()

        task = asyncio.create_task(run(), name="cache write")
        self._writes.add(task)
        task.add_done_callback(self._written)

    async def settle(self) -> None:
        """Wait for the background writes, which takes no longer than a few timeouts."""
        while self._writes:
            await asyncio.wait(tuple(self._writes))

    def _written(self, task: "asyncio.Task[None]") -> None:
        self._writes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("cache_write_failed", kind=type(error).__name__)

    async def _ask(self, call: Callable[[], Awaitable[object]]) -> object:
        """Redis's reply, or a LookUpResult when Redis is unavailable or the key holds another type."""
        breaker = self._breaker
        if not breaker.lets_through(1_000 * self._clock_s()):
            return LookUpResult.UNAVAILABLE
        try:
            async with asyncio.timeout(self._timeout_s), self._turns:
                answer = await call()
        except (RedisError, OSError, TimeoutError) as error:
            if isinstance(error, ResponseError) and "WRONGTYPE" in str(error):
                # Redis answered: the key holds a value of another type.
                breaker.succeeded()
                return LookUpResult.POISONED
            was_open = breaker.is_open
            breaker.failed(1_000 * self._clock_s(), random())  # noqa: S311 - jitter, no secret
            if breaker.is_open and not was_open:
                log.warning("cache_unavailable", error=type(error).__name__)
            return LookUpResult.UNAVAILABLE
        except BaseException:
            breaker.abandoned()
            raise
        breaker.succeeded()
        return answer


def count(cache: str, result: LookUpResult) -> None:
    metrics.CACHE_LOOKUPS.labels(cache=cache, result=result).inc()


def _split(rows: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(rows):
        begin = at + _ROW_LENGTH.size
        at = begin + _ROW_LENGTH.unpack_from(rows, at)[0]
        yield rows[begin:at]


def _wrote(key: CacheKey, result: str) -> bool:
    metrics.CACHE_WRITES.labels(cache=key.cache, result=result).inc()
    return result == "stored"
