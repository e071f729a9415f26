"""Parts that continuous engines share: a thread with an event loop, and a run that waits for its items."""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from inference_consumers.engines.protocol import ItemOutcome, RunCost, RunObserver, computed_tokens

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
