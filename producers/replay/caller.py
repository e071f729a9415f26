"""One call from its due time to its record; shared by open and closed loops."""

import asyncio
from collections.abc import Callable, Iterable
from time import monotonic

from producers.replay.outcome import INTERRUPTED, NOT_SENT, TIMEOUT, Answer
from producers.replay.plan import Call
from producers.replay.report import Ended, Tallies
from producers.replay.target import Target


class Caller:
    """Makes calls and tells the tallies what became of them."""

    def __init__(
        self, target: Target, tallies: Tallies, timeout_s: float, clock: Callable[[], float] = monotonic
    ) -> None:
        """``timeout_s``: how long a call has, from when it is due."""
        self._target = target
        self._tallies = tallies
        self._timeout_s = timeout_s
        self._clock = clock
        self._started_s = clock()

    def begin(self) -> None:
        """The run starts now."""
        self._started_s = self._clock()

    def elapsed_s(self) -> float:
        """Since the start of the run."""
        return self._clock() - self._started_s

    async def make(self, call: Call) -> None:
        """Make the call and wait for its end. When cancelled, it counts as interrupted."""
        sent_s = self.elapsed_s()
        left_s = call.due_s + self._timeout_s - sent_s
        if left_s <= 0:
            self.leave_out(call)
            return
        first_text_s: float | None = None

        def on_text() -> None:
            nonlocal first_text_s
            first_text_s = first_text_s or self.elapsed_s()

        answer = Answer(INTERRUPTED)
        try:
            async with asyncio.timeout(left_s):
                answer = await self._target.ask(call, left_s, on_text)
        except TimeoutError:
            answer = Answer(TIMEOUT)
        finally:
            self._tallies.add(Ended(call.tenant, call.due_s, sent_s, self.elapsed_s(), answer, first_text_s))

    def leave_out(self, call: Call) -> None:
        """It could not be made."""
        self._tallies.add(Ended(call.tenant, call.due_s, None, self.elapsed_s(), Answer(NOT_SENT)))


async def leave_when(stopping: asyncio.Event, under_way: Iterable[asyncio.Task[None]]) -> None:
    """Cancel what is under way once the run is to stop."""
    await stopping.wait()
    for task in tuple(under_way):
        task.cancel()


async def wait_until(stopping: asyncio.Event, seconds: float) -> bool:
    """Whether the run is to stop; known after ``seconds`` at the latest."""
    if seconds > 0 and not stopping.is_set():
        try:
            async with asyncio.timeout(seconds):
                await stopping.wait()
        except TimeoutError:
            return False
    return stopping.is_set()
