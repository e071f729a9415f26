"""``run`` of an engine that schedules by itself: add the items, and wait for the last outcome."""

import threading
from collections.abc import Callable, Sequence

from inference_consumers.engines.protocol import (
    ContinuousEngine,
    EngineItem,
    Failure,
    ItemOutcome,
    RunCost,
    RunObserver,
)

_LOOK_EVERY_S = 0.2


def computed_tokens(outcome: ItemOutcome) -> int:
    """Tokens computed for an item by an engine without padding. Cached tokens are not counted; 0 for a failure."""
    if isinstance(outcome, Failure):
        return 0
    usage = outcome.usage
    return usage.prompt_tokens - usage.cached_tokens + usage.completion_tokens


class WaitedRun:
    """Passes everything on to an observer, and knows when all outcomes were reported."""

    def __init__(self, observer: RunObserver, items: int) -> None:
        self._observer = observer
        self._left = items
        self._tokens = 0
        self._is_done = threading.Event()
        if items == 0:
            self._is_done.set()

    def text(self, index: int, delta: str) -> None:
        self._observer.text(index, delta)

    def finished(self, index: int, outcome: ItemOutcome) -> None:
        self._observer.finished(index, outcome)
        self._tokens += computed_tokens(outcome)
        self._left -= 1

    def step(self) -> None:
        self._observer.step()
        if self._left == 0:
            self._is_done.set()

    def is_cancelled(self, index: int) -> bool:
        return self._observer.is_cancelled(index)

    def wait(self, check_engine: Callable[[], None]) -> RunCost:
        while not self._is_done.wait(_LOOK_EVERY_S):
            check_engine()
        # An engine without batches pads nothing.
        return RunCost(useful_tokens=self._tokens, computed_tokens=self._tokens)


def join_and_wait(
    engine: ContinuousEngine, batch: Sequence[EngineItem], observer: RunObserver, check_engine: Callable[[], None]
) -> RunCost:
    """``Engine.run`` by ``ContinuousEngine.join``. Raises what ``check_engine`` raises when the engine is dead."""
    run = WaitedRun(observer, len(batch))
    if batch:
        engine.join(batch, run)
    return run.wait(check_engine)
