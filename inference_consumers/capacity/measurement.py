"""Measured capacity of a process's engines. Pure: runs in, rates out.

Rates are kept by batch size, in buckets of powers of two, because a batch of 32 gives many times the tokens per second
of a lone item. The best bucket is the capacity: a lone request in a quiet hour must not look like a slow engine.

Cost is in tokens that the engine counted, while the dispatcher's queue and window are in estimates, which learn from
the same counts. A best bucket measured in estimates would stay wrong for long after an estimate was corrected.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from fairlane.outcomes import Health
from fairlane.records import TokenUsage, WorkItem
from fairlane_server.admission_rule import cost_tokens
from inference_consumers.batching.received_work import ModelKey

_KEPT_PER_RUN = 0.7
"""What the past counts for after another run of its bucket: after 8 runs of like size it is 6 % of the average."""

_LONGEST_RUN = 4.0
"""A run counts for at most so many times the time predicted by its bucket: one stall (a paused process, a page that had
to be read) must not look like a slow engine. A lasting slowdown is still followed."""

SUPERSEDED_AFTER = 4
"""A bucket that was not run while so many larger batches were says nothing any more: the engine may have slowed down
since. A larger bucket stays known however many small batches run, or every quiet hour would forget the peak."""

FRESH_FOR_S = 60.0
"""Engine time, so that an idle hour makes nothing old. A bucket without a run for longer, while others ran, counts for
no more than they prove: a batch takes no less time than a smaller one, so one of n times the items gives at most n
times its rate. Its next run begins it anew."""

FAILING_AFTER = 5
"""Micro-batches in a row in which nothing succeeded, before the process says that it is failing."""

RETRIED_AFTER_MS = 30_000
"""A failing process without work for so long reports itself healthy: only work shows whether it is, and it gets none
while it reports that it fails. One more failure and it is failing again."""


_WINDOW_MS = 1_000
"""Busy time of a window."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """One call of an engine that came back. Prompt, completion and cost as the engine counted them, cost as the
    dispatcher estimated it where the engine counts nothing; all of what succeeded only."""

    items: int
    prompt_tokens: int
    completion_tokens: int
    cost_tokens: int
    seconds: float


def measured(served: Sequence[tuple[WorkItem, TokenUsage]], items: int, seconds: float) -> MeasuredRun:
    """Measured run: items at a time, those served, and the time taken."""
    return MeasuredRun(
        items=items,
        prompt_tokens=sum(usage.prompt_tokens for _, usage in served),
        completion_tokens=sum(usage.completion_tokens for _, usage in served),
        cost_tokens=sum(
            cost_tokens(usage.prompt_tokens, usage.completion_tokens) or item.cost_tokens for item, usage in served
        ),
        seconds=seconds,
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """Tokens per second of engine time."""

    prompt_tokens_per_s: float = 0.0
    completion_tokens_per_s: float = 0.0
    cost_tokens_per_s: float = 0.0

    def scaled(self, by: float) -> "Rates":
        return Rates(self.prompt_tokens_per_s * by, self.completion_tokens_per_s * by, self.cost_tokens_per_s * by)


@dataclass(slots=True)
class _Bucket:
    """Sums of tokens and of time, older runs counting less. Their ratio weighs every second of engine time alike; a
    mean of rates would let a run of one token count like a run of thousands."""

    prompt: float = 0.0
    completion: float = 0.0
    cost: float = 0.0
    seconds: float = 0.0
    larger_runs_since: int = 0
    measured_at_s: float = 0.0

    def add(self, run: MeasuredRun) -> float:
        """Returns for how many seconds the run counts."""
        seconds = max(run.seconds, 1e-9)
        if self.cost > 0:
            seconds = min(seconds, _LONGEST_RUN * run.cost_tokens * self.seconds / self.cost)
        self.prompt = _KEPT_PER_RUN * self.prompt + run.prompt_tokens
        self.completion = _KEPT_PER_RUN * self.completion + run.completion_tokens
        self.cost = _KEPT_PER_RUN * self.cost + run.cost_tokens
        self.seconds = _KEPT_PER_RUN * self.seconds + seconds
        self.larger_runs_since = 0
        return seconds

    def rates(self) -> Rates:
        return Rates(self.prompt / self.seconds, self.completion / self.seconds, self.cost / self.seconds)


@dataclass(slots=True)
class CapacityMeter:
    """One process's engines. One thread at a time."""

    _buckets: dict[int, _Bucket] = field(default_factory=dict)
    _engine_s: float = 0.0
    """Engine time so far: the clock that buckets grow old by."""
    _batch_fill: float | None = None
    _failures: deque[bool] = field(default_factory=lambda: deque(maxlen=FAILING_AFTER))

    def ran(self, run: MeasuredRun) -> None:
        """An engine came back. A run in which nothing succeeded says nothing about speed."""
        if run.cost_tokens <= 0 or run.items <= 0:
            return
        size = (run.items - 1).bit_length()
        for other in [other for other in self._buckets if other < size]:
            bucket = self._buckets[other]
            bucket.larger_runs_since += 1
            if bucket.larger_runs_since >= SUPERSEDED_AFTER:
                del self._buckets[other]
        known = self._buckets.get(size)
        bucket = known if known is not None and self._is_fresh(known) else _Bucket()
        self._engine_s += bucket.add(run)
        bucket.measured_at_s = self._engine_s
        self._buckets[size] = bucket

    def finished(self, fill: float, *, failed: bool | None) -> None:
        """A micro-batch is done, however many runs it took.

        ``fill`` is its part of the larger of its two bounds; ``failed`` whether nothing in it succeeded, None when
        that was the senders' doing and says nothing about the engine.
        """
        fill = min(1.0, fill)
        past = fill if self._batch_fill is None else self._batch_fill
        self._batch_fill = _KEPT_PER_RUN * past + (1 - _KEPT_PER_RUN) * fill
        if failed is not None:
            self._failures.append(failed)

    @property
    def rates(self) -> Rates:
        """Those of the bucket with the most cost tokens per second; all 0 before the first run."""
        measured = [self._vouched(size, bucket) for size, bucket in self._buckets.items()]
        return max(measured, key=lambda rates: rates.cost_tokens_per_s, default=Rates())

    def predicted_s(self, items: int, cost_tokens: int) -> float | None:
        """The time within which a batch is expected to run; None before the first run.

        Of sizes that were not run it is the larger bound: a batch takes no more time than a larger one of like items,
        and no more than its items take in smaller ones, one after the other.
        """
        size = (items - 1).bit_length()
        rates = [
            bucket.rates().cost_tokens_per_s * 2.0 ** min(0, size - other) for other, bucket in self._buckets.items()
        ]
        return cost_tokens / max(rates) if rates else None

    @property
    def batch_fill(self) -> float:
        return self._batch_fill or 0.0

    def health(self, idle_ms: int) -> Health:
        """Failing when the latest batches all failed, unless the engine had nothing to do for RETRIED_AFTER_MS."""
        failing = len(self._failures) == FAILING_AFTER and all(self._failures)
        return Health.FAILING if failing and idle_ms < RETRIED_AFTER_MS else Health.HEALTHY

    def _is_fresh(self, bucket: _Bucket) -> bool:
        return self._engine_s - bucket.measured_at_s <= FRESH_FOR_S

    def _vouched(self, size: int, bucket: _Bucket) -> Rates:
        """Rate of a bucket, limited by what the fresh smaller ones prove."""
        rates = bucket.rates()
        if self._is_fresh(bucket):
            return rates
        bounds = [
            2 ** (size - other) * fresh.rates().cost_tokens_per_s
            for other, fresh in self._buckets.items()
            if other < size and self._is_fresh(fresh)
        ]
        return rates.scaled(min(1.0, min(bounds, default=0.0) / rates.cost_tokens_per_s))


@dataclass(frozen=True, slots=True)
class Reading:
    """Capacity and load of a consumer at one moment. Tokens of held work are the dispatcher's cost."""

    rates: Rates
    batch_fill: float
    health: Health
    held_items: int
    held_tokens: int


@dataclass(slots=True)
class BusyWindow:
    """Throughput of a continuous engine, whose runs overlap, over windows of busy time, which end when they are full or
    the engine rests. One thread at a time."""

    _active_items: int = 0
    _since_ms: int = 0
    _busy_ms: int = 0
    _item_ms: int = 0
    _served: list[tuple[WorkItem, TokenUsage]] = field(default_factory=list)

    def served(self, item: WorkItem, usage: TokenUsage) -> None:
        self._served.append((item, usage))

    def changed(self, now_ms: int, active_items: int) -> MeasuredRun | None:
        """So many items run from now on. Returns the measurement of a window that is full; a new one begins then."""
        if self._active_items > 0:
            passed_ms = max(0, now_ms - self._since_ms)
            self._busy_ms += passed_ms
            self._item_ms += passed_ms * self._active_items
        self._active_items, self._since_ms = active_items, now_ms
        if self._busy_ms == 0 or not self._served or (self._busy_ms < _WINDOW_MS and active_items > 0):
            return None
        items = max(1, round(self._item_ms / self._busy_ms))
        run = measured(self._served, items, self._busy_ms / 1_000)
        self._busy_ms = self._item_ms = 0
        self._served = []
        return run


@dataclass(slots=True)
class BusyTime:
    """Counts every moment once, however many runs an engine has under way. One thread at a time."""

    _counted_up_to_ms: dict[ModelKey, int] = field(default_factory=dict)

    def passed_s(self, key: ModelKey, now_ms: int, *, running: bool) -> float:
        """Seconds that this engine ran since the call before. It runs something from now on, or rests.

        A clock that was set back takes nothing away.
        """
        before_ms = self._counted_up_to_ms.pop(key, now_ms)
        if running:
            self._counted_up_to_ms[key] = now_ms
        return max(0, now_ms - before_ms) / 1_000
