"""Request coalescing: concurrent calls with the same key share one run."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

KeyT = TypeVar("KeyT", bound=Hashable)
ResultT = TypeVar("ResultT")


class SharedRunCancelledError(Exception):
    """The shared run cancelled itself; none of its callers did."""


@dataclass(slots=True, eq=False)
class _Flight(Generic[ResultT]):
    task: "asyncio.Task[ResultT]"
    waiting: int = 0


class Singleflight(Generic[KeyT, ResultT]):
    """Coalesces calls on one event loop. Each run is a separate task, so the first caller may be cancelled without
    affecting the others; the run is cancelled with its last caller. The key must contain everything that the result
    depends on.

    Args:
        most: most shared runs at a time; beyond it each caller runs alone.
    """

    def __init__(self, most: int = 1_024) -> None:
        self._most = most
        self._flights: dict[KeyT, _Flight[ResultT]] = {}

    def __len__(self) -> int:
        return len(self._flights)

    async def run(self, key: KeyT, call: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
        """Return or raise the result of ``call``, shared by all callers of the same key meanwhile.

        Raises:
            SharedRunCancelledError: the shared run cancelled itself.
        """
        flight = self._flights.get(key)
        if flight is None:
            if len(self._flights) >= self._most:
                return await call()
            flight = self._flights[key] = _Flight(asyncio.create_task(call(), name="shared run"))
            flight.task.add_done_callback(lambda _: self._land(key, flight))
        flight.waiting += 1
        try:
            # A cancellation ends this wait, not the shared run.
            return await asyncio.shield(flight.task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if flight.task.cancelled() and (current is None or not current.cancelling()):
                raise SharedRunCancelledError("the shared run was cancelled") from None
            raise
        finally:
            flight.waiting -= 1
            if not flight.waiting and not flight.task.done():
                # Later callers start a new run.
                self._land(key, flight)
                flight.task.cancel()

    def _land(self, key: KeyT, flight: _Flight[ResultT]) -> None:
        if self._flights.get(key) is flight:
            del self._flights[key]
        if flight.task.done() and not flight.task.cancelled():
            # Retrieve the exception: without callers left asyncio would log it as never retrieved.
            flight.task.exception()
