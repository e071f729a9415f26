"""Parts that continuous engines share: a thread with an event loop, a run that waits for its items, and their death."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from inference_consumers.engines.protocol import EngineGoneError, ItemOutcome, RunCost, RunObserver, computed_tokens

_END_TIMEOUT_S = 10.0
_LOOK_EVERY_S = 0.2

_T = TypeVar("_T")


class LoopThread:
    """An event loop on a thread of its own, from the start until ``close``."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def post(self, function: Callable[[], None]) -> None:
        self._loop.call_soon_threadsafe(function)

    def result_of(self, work: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_TIMEOUT_S)

    def _run(self) -> None:
        # Its end cancels the tasks that are left.
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.get_loop().run_forever()


class WaitedRun:
    """Passes everything on to an observer, and waits until all outcomes were reported."""

    def __init__(self, observer: RunObserver, items: int) -> None:
        self._observer = observer
        self.text = observer.text
        self.is_cancelled = observer.is_cancelled
        self._left = items
        self._tokens = 0
        self._is_done = threading.Event()

    def finished(self, index: int, outcome: ItemOutcome) -> None:
        self._observer.finished(index, outcome)
        self._tokens += computed_tokens(outcome)
        self._left -= 1

    def step(self) -> None:
        self._observer.step()
        if self._left == 0:
            self._is_done.set()

    def wait(self, check_engine: Callable[[], None]) -> RunCost:
        while not self._is_done.wait(_LOOK_EVERY_S):
            check_engine()
        # An engine without batches pads nothing.
        return RunCost(useful_tokens=self._tokens, computed_tokens=self._tokens)


class EngineDeath:
    """The first error that ended an engine. It is reported once, to ``watch``, and every later call raises it."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._on_death: Callable[[BaseException], None] | None = None
        self._lock = threading.Lock()

    def watch(self, on_death: Callable[[BaseException], None]) -> None:
        """Call this with the error, now if it has happened."""
        with self._lock:
            self._on_death = on_death
            error = self._error
        if error is not None:
            on_death(error)

    def check_alive(self) -> None:
        """Raises EngineGoneError."""
        if self._error is not None:
            # Not the cause itself: that would be taken for a failure on the items that came after.
            raise EngineGoneError(str(self._error)) from self._error

    def report(self, error: BaseException) -> None:
        """The engine has ended by this error, unless it had by another."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            on_death = self._on_death
        if on_death is not None:
            on_death(error)

    async def guarded(self, work: Awaitable[None]) -> None:
        """Await this; its error ends the engine."""
        try:
            await work
        except Exception as error:  # noqa: BLE001 - an item would have no outcome for ever: better the process ends
            self.report(error)

    def guard(self, call: Callable[[], None]) -> None:
        """Call this; its error ends the engine."""
        try:
            call()
        except Exception as error:  # noqa: BLE001 - as above
            self.report(error)
