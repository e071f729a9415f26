"""Bounded write-behind queue of Redis entries; drops what exceeds its bounds."""

import asyncio
from collections import deque
from collections.abc import Callable
from threading import Lock

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane_server.caching.keys import CacheKey
from fairlane_server.redis.cache import RedisCache

log = get_logger(__name__)

MOST_WAITING = 8_192
MOST_WAITING_BYTES = 33_554_432

_BATCH = 256
_BATCH_BYTES = 2_097_152
_GATHER_S = 0.005
_FLUSH_TIMEOUT_S = 1.0

Encode = Callable[[], bytes]


class WriteQueue:
    """Writes entries in the order they were put, many in one round trip.

    Args:
        cache: cache to write to; while it does not answer, queued entries are dropped.
        most: bound on queued entries.
        most_bytes: bound on their approximate size.
    """

    def __init__(self, cache: RedisCache, most: int = MOST_WAITING, most_bytes: int = MOST_WAITING_BYTES) -> None:
        self._cache = cache
        self._most = most
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._entries: deque[tuple[CacheKey, int, Encode]] = deque()
        self._bytes = 0
        self._is_woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to write, in the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._write_for_ever(), name="result cache writer")
        self._task.add_done_callback(_ended)
        self._wake.set()

    async def close(self) -> None:
        """Write queued entries, within a second. Later entries are dropped."""
        with self._lock:
            self._loop = None
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait((self._task,))
        try:
            async with asyncio.timeout(_FLUSH_TIMEOUT_S):
                await self._write()
        except TimeoutError:
            log.warning("result_cache_not_flushed", entries=len(self._entries))

    def put(self, key: CacheKey, size_bytes: int, encode: Encode) -> bool:
        """Queue an entry; returns whether there was room. Thread-safe.

        Args:
            key: key of the entry.
            size_bytes: its approximate size.
            encode: makes its payload, later and in the event loop, so that ``put`` is cheap.
        """
        with self._lock:
            loop = self._loop
            fits = len(self._entries) < self._most and self._bytes + size_bytes <= self._most_bytes
            if loop is None or not fits:
                metrics.CACHE_WRITES.labels(cache=key.cache, result="dropped").inc()
                return False
            self._entries.append((key, size_bytes, encode))
            self._bytes += size_bytes
            if not self._is_woken:
                self._is_woken = True
                loop.call_soon_threadsafe(self._wake.set)
        return True

    async def _write_for_ever(self) -> None:
        while True:
            await self._wake.wait()
            await asyncio.sleep(_GATHER_S)
            self._wake.clear()
            with self._lock:
                self._is_woken = False
            await self._write()

    async def _write(self) -> None:
        while batch := self._take():
            await self._cache.put_all(batch)

    def _take(self) -> list[tuple[CacheKey, bytes]]:
        taken: list[tuple[CacheKey, int, Encode]] = []
        size = 0
        with self._lock:
            while self._entries and len(taken) < _BATCH and size < _BATCH_BYTES:
                taken.append(self._entries.popleft())
                size += taken[-1][1]
            self._bytes -= size
        return [(key, encode()) for key, _, encode in taken]


def _ended(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("result_cache_writer_failed", kind=type(error).__name__)
