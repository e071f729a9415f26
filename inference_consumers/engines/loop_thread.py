"""An event loop in a thread of its own, for an asyncio library beside blocking code."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from typing import TypeVar

_END_TIMEOUT_S = 10.0

T = TypeVar("T")


class LoopThread:
    """Runs from the start until ``close``."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, function: Callable[[], None]) -> None:
        """Have it called soon, in the order of the calls to this."""
        self._loop.call_soon_threadsafe(function)

    def result_of(self, work: Awaitable[T]) -> T:
        """Wait for it. Raises what it raises."""

        async def awaited() -> T:
            return await work

        return asyncio.run_coroutine_threadsafe(awaited(), self._loop).result()

    def close(self) -> None:
        """End the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()
