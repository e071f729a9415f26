"""Replies that this instance has just read, before Redis or Postgres has them."""

from collections import OrderedDict
from threading import Lock

from fairlane_server.postgres.request_timeline import RecordedReply
from producers.openai_api.reply_errors import was_not_run

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
