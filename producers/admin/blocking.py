"""Blocking calls from an event loop: each store in a thread of its own, with a bounded queue."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from producers.openai_api.errors import GatewayError

BUSY = "busy"
"""The admin API's own code: as many calls wait for this store as may."""
_MOST_WAITING = 32
_RETRY_AFTER_MS = 2_000

T = TypeVar("T")


class Serial:
    """One thread for stores that are not thread-safe: its calls run one after another, whether or not their callers
    still wait. For one event loop."""

    def __init__(self, name: str, most_waiting: int = _MOST_WAITING) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._name = name
        self._most_waiting = most_waiting
        self._waiting = 0

    async def run(self, call: Callable[[], T]) -> T:
        """The result of ``call``. Raises GatewayError: 503 if too many wait; and what ``call`` raises."""
        if self._waiting >= self._most_waiting:
            message = f"as many calls about {self._name} wait as may"
            raise GatewayError(503, BUSY, message, retry_after_ms=_RETRY_AFTER_MS)
        self._waiting += 1
        loop, future = asyncio.get_running_loop(), self._thread.submit(call)
        future.add_done_callback(lambda _done: self._ended(loop))
        return await asyncio.wrap_future(future)

    async def close(self) -> None:
        """Drop the calls that wait, and return when the one under way has ended."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)

    def _ended(self, loop: asyncio.AbstractEventLoop) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._count_down)

    def _count_down(self) -> None:
        self._waiting -= 1
