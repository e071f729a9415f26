"""Those who ask for the same at the same time share one run."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ResultT = TypeVar("ResultT")


class SharedRunCancelledError(Exception):
    """The shared run was cancelled from inside, and not by any of those who wait for it."""


@dataclass(slots=True, eq=False)
class _Flight(Generic[ResultT]):
    task: "asyncio.Task[ResultT]"
    waiting: int = 0


class Singleflight(Generic[KeyT, ResultT]):
    """On one event loop. A run has a task of its own, so whoever asked first may leave without the others noticing; it
    is cancelled with the last one who waits for it. The key must name everything that the result depends on.

    Args:
        most: runs that are shared at a time; beyond that each caller runs alone.
    """

    def __init__(self, most: int = 1_024) -> None:
        self._most = most
        self._flights: dict[KeyT, _Flight[ResultT]] = {}

    def __len__(self) -> int:
        """Runs under way."""
        return len(self._flights)

    async def run(self, key: KeyT, call: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """What ``call`` returns or raises, for all who ask by the same key meanwhile.

        Raises:
            SharedRunCancelledError: what was called ended by cancelling itself.
        """
        flight = self._flights.get(key)
        if flight is None:
            if len(self._flights) >= self._most:
                return await call()
            flight = self._flights[key] = _Flight(asyncio.create_task(call(), name="shared run"))
            flight.task.add_done_callback(lambda _: self._land(key, flight))
        flight.waiting += 1
        try:
            # Cancels the wait and not what is waited for.
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if flight.task.cancelled() and (current is None or not current.cancelling()):
                raise SharedRunCancelledError("the shared run was cancelled") from None
            raise
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                # Whoever asks from here on starts anew.
                self._land(key, flight)
                flight.task.cancel()

    def _land(self, key: KeyT, flight: _Flight[ResultT]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            # Nobody may be left to look at it, which asyncio would complain about.
            flight.task.exception()
