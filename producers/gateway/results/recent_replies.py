"""Replies that this instance has just read, and waiters by request id."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock

from fairlane_server.postgres.request_timeline import RecordedReply
from producers.openai_api.errors import was_not_run

KEEP_MS = 5_000
"""By then they are in Redis or Postgres."""
MOST_REPLIES = 1_000
MOST_BYTES = 4_194_304

_Key = tuple[str, str]


class RecentReplies:
    """Bounded in number and size; evicts the oldest. A later reply replaces the earlier one of its request, unless the
    later was not run and the earlier was. Thread-safe."""

    def __init__(self, most: int = MOST_REPLIES, most_bytes: int = MOST_BYTES, keep_ms: int = KEEP_MS) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._keep_ms = keep_ms
        self._lock = Lock()
        self._replies: OrderedDict[_Key, tuple[RecordedReply, int]] = OrderedDict()
        self._bytes = 0

    def put(self, recorded: RecordedReply, size_bytes: int) -> bool:
        """Store a reply of about ``size_bytes``, unless it is too large.

        Returns False if an earlier reply takes precedence.
        """
        key = recorded.reply.tenant, recorded.reply.request_id
        with self._lock:
            there = self._replies.get(key)
            if there is not None and was_not_run(recorded.reply) and not was_not_run(there[0].reply):
                return False
            self._drop(key)
            if size_bytes > self._most_bytes:
                return True
            self._replies[key] = recorded, size_bytes
            self._bytes += size_bytes
            while len(self._replies) > self._most or self._bytes > self._most_bytes:
                self._drop(next(iter(self._replies)))
            return True

    def get(self, tenant: str, request_id: str, now_ms: int) -> RecordedReply | None:
        """The reply; None if there is none or it is too old."""
        with self._lock:
            found = self._replies.get((tenant, request_id))
            if found is None:
                return None
            if now_ms - found[0].replied_at_ms > self._keep_ms:
                self._drop((tenant, request_id))
                return None
            return found[0]

    def _drop(self, key: _Key) -> None:
        gone = self._replies.pop(key, None)
        if gone is not None:
            self._bytes -= gone[1]


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
        """Number of requests waited for."""
        return len(self._waiting)


def _tell(arrival: Arrival, recorded: RecordedReply) -> None:
    if not arrival.done():
        arrival.set_result(recorded)
