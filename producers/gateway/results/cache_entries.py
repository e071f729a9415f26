"""Waiters for replies, and the Redis entries of requests, written behind in a bounded queue."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from threading import Lock

import msgspec

from fairlane import metrics
from fairlane.logs import get_logger
from fairlane.records import InferenceReply
from fairlane_server.caching.entries import UNREADABLE, CacheKey
from fairlane_server.postgres.request_timeline import RecordedReply
from fairlane_server.redis.cache import RedisCache

MOST_ENTRY_BYTES = 1_048_576
"""Larger replies are in Postgres only."""

_ENTRY_BYTES, _NUMBER_BYTES, _ITEM_BYTES = 512, 9, 48


class AcceptedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that was published, or may have been. It is known by this entry until the recorder stores it.

    Tens of thousands are kept; they hold only strings and numbers, so the garbage collector does not track them.
    """

    request_id: str
    model: str
    task: str
    accepted_at_ms: int


class _Replied(msgspec.Struct, frozen=True, array_like=True):
    replied_at_ms: int
    reply: InferenceReply


encoder = msgspec.msgpack.Encoder()
_reply_decoder = msgspec.msgpack.Decoder(_Replied)
_accepted_decoder = msgspec.msgpack.Decoder(AcceptedRequest)


def size_of_reply(reply: InferenceReply) -> int:
    """Approximate size of its entry in bytes, without encoding it."""
    output = reply.output
    if output is None:
        return _ENTRY_BYTES
    numbers = len(output.scores or ()) + sum(map(len, output.embeddings or ()))
    items = len(output.labels or ()) + sum(1 + len(token.top) for token in output.logprobs or ())
    return _ENTRY_BYTES + len(output.text or "") + _NUMBER_BYTES * numbers + _ITEM_BYTES * items


def encode_reply(recorded: RecordedReply) -> bytes:
    """Payload of a reply's entry. Omits the conversation turn, which holds text of the request."""
    return encoder.encode(_Replied(recorded.replied_at_ms, replace(recorded.reply, turn=None)))


def decode_reply(key: CacheKey, request_id: str, payload: bytes) -> RecordedReply | None:
    """Inverse of ``encode_reply``; None if the payload is unreadable, or of another request or tenant."""
    try:
        found = _reply_decoder.decode(payload)
    except UNREADABLE:
        return None
    if (found.reply.tenant, found.reply.request_id) != (key.tenant, request_id):
        return None
    return RecordedReply(found.reply, found.replied_at_ms)


def decode_accepted(request_id: str, payload: bytes) -> AcceptedRequest | None:
    """Inverse of ``encode_accepted``; None if the payload is unreadable or of another request."""
    try:
        found = _accepted_decoder.decode(payload)
    except UNREADABLE:
        return None
    return found if found.request_id == request_id else None


log = get_logger(__name__)

MOST_WAITING = 8_192
MOST_WAITING_BYTES = 33_554_432

_BATCH = 256
_BATCH_BYTES = 2_097_152
_GATHER_S = 0.005
_FLUSH_TIMEOUT_S = 1.0

Encode = Callable[[], bytes]


class WriteQueue:
    """Writes entries in the order they were put, many in one round trip. Bounded in number and approximate size. While
    the cache does not answer, queued entries are dropped."""

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
        """Queue an entry of about ``size_bytes``; returns whether there was room. Thread-safe.

        ``encode`` makes its payload, later and in the event loop, so that ``put`` is cheap.
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


Arrival = asyncio.Future[RecordedReply]


class Arrivals:
    """Any number may wait for the same reply. Only replies read by this instance resolve a waiter, so waiters must look
    elsewhere too. After ``end_waiting`` all futures are cancelled."""

    def __init__(self) -> None:
        self._has_ended = False
        self._waiting: dict[tuple[str, str], set[Arrival]] = {}

    @contextmanager
    def awaited(self, tenant: str, request_id: str) -> Iterator[Arrival]:
        """A future of the reply, for the duration of the block. Call in the event loop."""
        key = tenant, request_id
        arrival: Arrival = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(arrival)
        if self._has_ended:
            arrival.cancel()
        try:
            yield arrival
        finally:
            waiting = self._waiting[key]
            waiting.discard(arrival)
            if not waiting:
                del self._waiting[key]
            arrival.cancel()

    def came(self, recorded: RecordedReply) -> None:
        """Resolve the waiters of a reply. Thread-safe."""
        key = recorded.reply.tenant, recorded.reply.request_id
        # A copy: the event loop may change the set meanwhile.
        for arrival in tuple(self._waiting.get(key, ())):
            # Raised by a closed loop, in which nobody waits.
            with suppress(RuntimeError):
                arrival.get_loop().call_soon_threadsafe(_tell, arrival, recorded)

    def end_waiting(self) -> None:
        """Cancel all futures, also later ones. Call in the event loop."""
        self._has_ended = True
        for waiting in self._waiting.values():
            for arrival in waiting:
                arrival.cancel()

    def __len__(self) -> int:
        return len(self._waiting)


def _tell(arrival: Arrival, recorded: RecordedReply) -> None:
    if not arrival.done():
        arrival.set_result(recorded)
