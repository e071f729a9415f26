"""Cache writer: stores answers in Redis on a thread of its own; nothing waits for it.

Whatever Redis does, an answer costs its request no more than a place in a queue: what finds no place, or comes while
Redis is late or away, is not kept, and nothing is tried twice.
"""

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from redis import Redis
from redis.exceptions import RedisError

from fairlane import metrics
from fairlane.backoff import Backoff
from fairlane.clock import ClockMs, monotonic_ms
from fairlane.logs import get_logger
from fairlane.records import InferenceReply, WorkItem
from fairlane.settings import Settings
from fairlane_server.caching.entries import CacheName, jittered_ttl_ms, seal
from fairlane_server.caching.responses import answer_of, encode_answer
from fairlane_server.circuit_breaker import BreakerPolicy, CircuitBreaker
from fairlane_server.redis.client import blocking_redis_client

log = get_logger(__name__)

TIMEOUT_S = 0.25
"""Of a connection, and of each answer of Redis."""

# A Redis that hangs costs the thread three time-outs in a row, and then one once in a while.
_BREAKER = BreakerPolicy(failures=3, rest=Backoff(first_s=0.5, longest_s=2.0))


_SealedAnswer = tuple[str, bytes]
"""The name of a cache entry, and its data."""


@dataclass(eq=False)
class CacheWriter:
    """Keeps the answers of work that asks for it (``WorkItem.cache_answer``), sealed, under the key that the dispatcher
    looks them up by. ``keep`` may be called from any thread.

    An answer that a conversation or a degradation went into is its asker's alone.
    """

    redis: Redis
    """Answers within a time-out and tries nothing again; it is closed with this."""
    ttl_s: float
    clock_ms: ClockMs = monotonic_ms
    chance: Callable[[], float] = random.random
    max_entries: int = 1_024
    """Of the queue, like ``max_bytes``."""
    max_bytes: int = 16 * 1024 * 1024
    batch_entries: int = 64
    """Of one write, like ``batch_bytes``."""
    batch_bytes: int = 1024 * 1024
    _breaker: CircuitBreaker = field(default_factory=lambda: CircuitBreaker(_BREAKER))
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _waiting: deque[_SealedAnswer] = field(default_factory=deque)
    _bytes: int = 0
    _closing: bool = False

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="kept-answers", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def keep(self, work: WorkItem, reply: InferenceReply) -> None:
        """Have it written soon, if it may answer others. Does not wait and does not raise."""
        if not work.cache_answer or work.history:
            return
        try:
            entry = entry_of(work, reply)
        except Exception as error:  # noqa: BLE001 - an answer that cannot be kept is an answer all the same
            log.error("answer_not_kept", request_id=reply.request_id, error=type(error).__name__)
            return
        if entry is not None:
            self._add(entry)

    def close(self, timeout_s: float) -> None:
        """Write the queue within a time limit; later entries are dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            with self._changed:
                _count("dropped", len(self._waiting))
                self._waiting.clear()
        else:
            self.redis.close()

    def _add(self, entry: _SealedAnswer) -> None:
        with self._changed:
            full = len(self._waiting) >= self.max_entries
            if self._closing or full or self._bytes + len(entry[1]) > self.max_bytes:
                _count("dropped")
                return
            self._waiting.append(entry)
            self._bytes += len(entry[1])
            self._changed.notify()

    def _run(self) -> None:
        while entries := self._next():
            self._write(entries)

    def _next(self) -> list[_SealedAnswer]:
        """Entries of the next write, at least one; none at the end."""
        with self._changed:
            while not self._waiting and not self._closing:
                self._changed.wait()
            taken: list[_SealedAnswer] = []
            size_bytes = 0
            while self._waiting and len(taken) < self.batch_entries:
                size_bytes += len(self._waiting[0][1])
                if taken and size_bytes > self.batch_bytes:
                    break
                taken.append(self._waiting.popleft())
                self._bytes -= len(taken[-1][1])
            return taken

    def _write(self, entries: Sequence[_SealedAnswer]) -> None:
        if not self._breaker.lets_through(self.clock_ms()):
            _count("unavailable", len(entries))
            return
        stored, error = 0, ""
        try:
            with self.redis.pipeline(transaction=False) as pipeline:
                for name, data in entries:
                    pipeline.set(name, data, px=jittered_ttl_ms(self.ttl_s, self.chance()))
                answers = pipeline.execute(raise_on_error=False)
            stored = sum(answer is True for answer in answers)
            error = next((type(answer).__name__ for answer in answers if answer is not True), "")
        except (RedisError, OSError) as failure:
            error = type(failure).__name__
        except Exception as failure:  # noqa: BLE001 - the thread must live on, whatever the library comes up with
            error = type(failure).__name__
            log.error("answers_not_kept", error=error)
        _count("stored", stored)
        _count("unavailable", len(entries) - stored)
        self._judge(stored, error)

    def _judge(self, stored: int, error: str) -> None:
        """Treat a Redis that refuses writes as unavailable."""
        if stored:
            self._breaker.succeeded()
            return
        was_open = self._breaker.is_open
        self._breaker.failed(self.clock_ms(), self.chance())
        if self._breaker.is_open and not was_open:
            log.warning("cache_writer_unavailable", error=error)


def entry_of(work: WorkItem, reply: InferenceReply) -> _SealedAnswer | None:
    """The entry of an answer, if others would get the same answer; too large ones are counted."""
    kept = answer_of(work, reply)
    if kept is None:
        return None
    key, answer = kept
    data = seal(key, encode_answer(answer))
    if data is None:
        _count("too_large")
        return None
    return key.name, data


def cache_writer_for(settings: Settings) -> CacheWriter | None:
    """The cache writer, not started; None without Redis. Raises ValueError for an invalid address."""
    if settings.redis_cache_url is None:
        return None
    return CacheWriter(blocking_redis_client(settings.redis_cache_url, TIMEOUT_S), settings.cache_ttl_s)


def _count(result: str, entries: int = 1) -> None:
    if entries:
        metrics.CACHE_WRITES.labels(cache=CacheName.RESPONSE, result=result).inc(entries)
