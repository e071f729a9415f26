"""Streamed texts of requests answered with an id, kept briefly until a client asks for their events."""

import asyncio
from collections import Counter, OrderedDict

from producers.gateway.ports import PendingReply

KEEP_S = 60.0
MOST_KEPT = 1_000

_Key = tuple[str, str]


class KeptStreams:
    """At most ``most``, of which one tenant may have a quarter. The oldest is dropped first; the reply still has the
    whole text. For one event loop."""

    def __init__(self, most: int = MOST_KEPT, keep_s: float = KEEP_S) -> None:
        self._most = most
        self._most_of_tenant = max(1, most // 4)
        self._keep_s = keep_s
        self._kept: OrderedDict[_Key, tuple[PendingReply, asyncio.TimerHandle]] = OrderedDict()
        self._of_tenant: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, tenant: str, waiting: PendingReply) -> None:
        """Keep a text until it is claimed, at most ``keep_s``."""
        key = tenant, waiting.request_id
        self._let_go(key)
        if self._of_tenant[tenant] >= self._most_of_tenant:
            self._let_go(next(kept for kept in self._kept if kept[0] == tenant))
        elif len(self._kept) >= self._most:
            self._let_go(next(iter(self._kept)))
        timer = asyncio.get_running_loop().call_later(self._keep_s, self._let_go, key)
        self._kept[key] = waiting, timer
        self._of_tenant[tenant] += 1

    def claim(self, tenant: str, request_id: str) -> PendingReply | None:
        """The kept waiter of this request, or None; the caller must ``forget`` it in the end."""
        kept = self._kept.pop((tenant, request_id), None)
        if kept is None:
            return None
        self._count_down(tenant)
        waiting, timer = kept
        timer.cancel()
        return waiting

    def close(self) -> None:
        """Drop all texts."""
        for key in tuple(self._kept):
            self._let_go(key)

    def _let_go(self, key: _Key) -> None:
        waiting = self.claim(*key)
        if waiting is not None:
            waiting.forget()

    def _count_down(self, tenant: str) -> None:
        self._of_tenant[tenant] -= 1
        if not self._of_tenant[tenant]:
            del self._of_tenant[tenant]
