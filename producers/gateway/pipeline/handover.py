"""From a thread that reads to the event loop, a few batches at a time: what the loop has no time for waits in Kafka."""

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

MOST_BATCHES = 4

_LOOK_S = 0.1


class Handover(Generic[ItemT]):
    """Made in the event loop.

    Args:
        take: called in the loop with each batch, in the order in which they were given.
        stopping: nobody waits for room any more once it is set.
    """

    def __init__(self, take: Callable[[list[ItemT]], None], stopping: threading.Event) -> None:
        self._take = take
        self._stopping = stopping
        self._loop = asyncio.get_running_loop()
        self._room = threading.BoundedSemaphore(MOST_BATCHES)

    def give(self, batch: list[ItemT]) -> None:
        """Hand it over; waits while the loop has not taken the last few. On other threads than the loop's."""
        while not self._room.acquire(timeout=_LOOK_S):
            if self._stopping.is_set():
                return
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._taken, batch)

    def _taken(self, batch: list[ItemT]) -> None:
        try:
            self._take(batch)
        finally:
            self._room.release()
