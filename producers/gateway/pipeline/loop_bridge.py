"""Thread-to-loop bridge with backpressure: a few batches at a time, while the rest waits in Kafka."""

import asyncio
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")

MOST_BATCHES = 4

_LOOK_S = 0.1


class Handover(Generic[ItemT]):
    """Passes batches from reader threads to the event loop that it was created in.

    Args:
        take: called in the loop with each batch, in order.
        stopping: once set, ``give`` no longer waits for room.
    """

    def __init__(self, take: Callable[[list[ItemT]], None], stopping: threading.Event) -> None:
        self._take = take
        self._stopping = stopping
        self._loop = asyncio.get_running_loop()
        self._room = threading.BoundedSemaphore(MOST_BATCHES)

    def give(self, batch: list[ItemT]) -> None:
        """Pass a batch to the loop; blocks while ``MOST_BATCHES`` are pending. Not for the loop's own thread."""
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
