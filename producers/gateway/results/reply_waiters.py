"""Waiters by request id, resolved by the reply reader."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from fairlane_server.postgres.request_timeline import RecordedReply

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
