"""Bound on the bytes passed from the fetching thread to the event loop and not taken by it yet."""

import asyncio
import threading
from collections import deque


class ReadAhead:
    """Thread-safe. Polls are passed on whole and taken in order, so the first record of a poll that the event loop sees
    proves that the polls before it are gone, taken or dropped on the way. For the newest poll there is no such proof:
    while it is the only one, the next poll is fetched whatever its size. So the bytes are bounded by ``max_bytes`` and
    one poll, or by two polls."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._polls: deque[tuple[int, int]] = deque()
        self._bytes = 0
        self._number = 0
        self._waiting: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes passed on and possibly not taken yet."""
        return self._bytes

    def hand_over(self, size_bytes: int) -> int:
        """Count a poll. Returns its number, which each of its records carries."""
        with self._lock:
            self._number += 1
            self._polls.append((self._number, size_bytes))
            self._bytes += size_bytes
            return self._number

    def taken(self, poll: int) -> None:
        """Note that a record of this poll has reached the event loop."""
        if not self._polls or self._polls[0][0] >= poll:
            return
        with self._lock:
            while self._polls and self._polls[0][0] < poll:
                self._bytes -= self._polls.popleft()[1]
            self._wake()

    def reset(self) -> None:
        """Forget all polls: partitions were revoked, and their records are dropped."""
        with self._lock:
            self._polls.clear()
            self._bytes = 0
            self._wake()

    async def wait_for_room(self, timeout_s: float) -> bool:
        """Wait for room to fetch more. Returns whether there is any. For the fetching thread only."""
        with self._lock:
            if self._has_room():
                return True
            event = asyncio.Event()
            self._waiting = (asyncio.get_running_loop(), event)
        try:
            async with asyncio.timeout(timeout_s):
                await event.wait()
        except TimeoutError:
            return False
        finally:
            with self._lock:
                self._waiting = None
        return True

    def _has_room(self) -> bool:
        return self._bytes < self._max_bytes or len(self._polls) == 1

    def _wake(self) -> None:
        if self._waiting is not None and self._has_room():
            loop, event = self._waiting
            loop.call_soon_threadsafe(event.set)
