"""Reports of a run to its consumer, collected until the next step and then sent at once."""

import threading
from collections.abc import Callable
from time import monotonic

from fairlane.outcomes import Code
from inference_consumers.engine_process.messages import (
    Channel,
    Ended,
    Finished,
    Step,
    Text,
    can_be_written,
)
from inference_consumers.engines.continuous import computed_tokens
from inference_consumers.engines.protocol import Failure, ItemOutcome, Problem, RunCost

_ALIVE_EVERY_S = 0.1


class RunReport:
    """The observer of one run, on the engine's side. Methods of an observer are called by one thread at a time;
    ``cancel`` by any.

    A second outcome of an item, or text after its outcome, is a mistake of the engine: RuntimeError.
    """

    def __init__(
        self,
        channel: Channel,
        run_id: int,
        items: int,
        on_end: Callable[[int], None],
        timer: Callable[[], float] = monotonic,
        *,
        ends_by_itself: bool = False,
    ) -> None:
        """``on_end`` is told the run's id when it is over. A run of a continuous engine ``ends_by_itself``, with the
        step after its last outcome: nobody waits for it and calls ``end``."""
        self._channel = channel
        self._run_id = run_id
        self._open = set(range(items))
        self._on_end = on_end
        self._timer = timer
        self._started = self._told_at = timer()
        self._texts: list[Text] = []
        self._finished: list[Finished] = []
        self._cancelled: frozenset[int] = frozenset()
        self._ends_by_itself = ends_by_itself
        self._is_over = False
        self._computed_tokens = 0
        self._lock = threading.Lock()

    def text(self, index: int, delta: str) -> None:
        """Send it with the next step."""
        if index not in self._open:
            raise RuntimeError(f"text of item {index}, which is done")
        self._texts.append(Text(index, delta))

    def finished(self, index: int, outcome: ItemOutcome) -> None:
        """Send it with the next step, or with the end."""
        if index not in self._open:
            raise RuntimeError(f"a second outcome of item {index}")
        self._open.remove(index)
        finished = Finished.of(index, outcome)
        if not can_be_written(finished):
            finished = Finished.of(index, Failure(Code.ENGINE_ERROR, "the answer is not valid Unicode"))
        self._computed_tokens += computed_tokens(outcome)
        self._finished.append(finished)

    def step(self) -> None:
        """Send what was told; without any of it, a sign of life now and then."""
        if self._is_over:
            return
        if self._ends_by_itself and not self._open:
            # An engine without batches pads nothing.
            self.end(RunCost(self._computed_tokens, self._computed_tokens))
        else:
            self._pass_on()

    def _pass_on(self) -> None:
        now = self._timer()
        if self._texts or self._finished or now - self._told_at >= _ALIVE_EVERY_S:
            self._told_at = now
            step = Step(self._run_id, tuple(self._texts), tuple(self._finished))
            self._texts, self._finished = [], []
            self._channel.write(step)

    def is_cancelled(self, index: int) -> bool:
        """Whether the consumer asked to stop this item."""
        return index in self._cancelled

    def cancel(self, indexes: tuple[int, ...]) -> None:
        """The consumer asks to stop these items."""
        with self._lock:
            self._cancelled |= set(indexes)

    def end(self, cost: RunCost, problem: Problem | None = None) -> None:
        """The run is over: send what is left, and that."""
        if problem is None and self._open:
            problem = Problem("MissingOutcome")
        if self._texts or self._finished:
            self._told_at = 0.0
            self._pass_on()
        self._is_over = True
        self._channel.write(
            Ended(
                self._run_id,
                self._timer() - self._started,
                useful_tokens=cost.useful_tokens,
                computed_tokens=cost.computed_tokens,
                problem=problem,
            )
        )
        self._on_end(self._run_id)
