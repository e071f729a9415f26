"""Batch size: the configured bounds, what the engine's memory holds, and the fewest items that reach its throughput.

Pure. Throughput is measured by size, in rungs of powers of two. A rung's throughput is a sum of tokens over a sum of
seconds, older runs counting less. A size that was not measured yet is assumed to be worth it: when so much waits, it is
tried. From then on the smallest rung near the best is taken, because a smaller batch is done sooner. Every so often the
rung above or below is tried again, so that a change of the engine is seen; tries that change nothing become rarer.
"""

from dataclasses import dataclass, field, replace
from math import log2

FULL_RUNS_BEFORE_MORE = 32
"""Runs at the lowered bound that went well, before a little more is tried. Twice as many after each try that failed."""

_MOST_RUNS_BEFORE_MORE = 1_024
_GROWTH_DIVISOR = 8
_FULL = 7 / 8
"""A run counts as one at the bound from here on: a token bound is seldom hit exactly."""

NEAR_BEST = 0.95
"""A smaller size is taken when it gives this part of the best throughput."""

_LEAVE_DOWN, _LEAVE_UP = 0.97, 0.93
"""What it takes to leave a size: more than to stay, or noise would move it to and fro."""

KEPT_PER_RUN = 0.9
_LONGEST_RUN = 2.0
"""A run counts for at most so many times what its rung promised: a stall must not change the size, and a lasting
slowdown is followed in a few runs more."""
_RUNS_TO_KNOW = 3
_REFUTED = 0.8
"""A trial in which a single run gives less than this part of what is known is over."""
_TRIES = 4
"""For want of room or company a batch may come out smaller than was asked for."""
_FIRST_INTERVAL, _LONGEST_INTERVAL = 16, 64
_STALE_AFTER = 64
"""Runs. What is measured anew after so long replaces what was known."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """When a batch is full, and how long it may wait for more. Tokens are the dispatcher's estimate of cost, and with
    them the padding."""

    max_items: int
    max_tokens: int
    timeout_ms: int


@dataclass(slots=True)
class _Bound:
    """One dimension of the safe size. ``value`` is None where nothing ever failed."""

    value: int | None = None
    proved: int = 0
    """The largest value at which enough runs went well before it was raised."""
    full_runs: int = 0
    full_runs_wanted: int = FULL_RUNS_BEFORE_MORE

    def failed(self, size: int) -> None:
        """Half of what failed, or what was proved, where that is less than what failed."""
        if self.proved >= size:
            self.proved = 0
        elif self.proved > 0:
            self.full_runs_wanted = min(_MOST_RUNS_BEFORE_MORE, 2 * self.full_runs_wanted)
        safe = max(1, size // 2, self.proved)
        self.value = safe if self.value is None else min(safe, self.value)
        self.full_runs = 0

    def ran(self, size: int, limit: int) -> None:
        """A run went well. Raises the bound by an eighth after enough of them, until it is the configured one."""
        if self.value is None or size < _FULL * self.value:
            return
        self.full_runs += 1
        if self.full_runs < self.full_runs_wanted:
            return
        self.full_runs = 0
        self.proved = self.value
        self.value += max(1, self.value // _GROWTH_DIVISOR)
        if self.value >= limit:
            self.value = None

    def of(self, limit: int) -> int:
        return limit if self.value is None else min(limit, self.value)


@dataclass(slots=True)
class SafeSize:
    """What one model's engine has memory for. One thread at a time.

    Tokens and items are bounded apart: a batch of few long items and one of many short ones use memory for different
    reasons, and each bound is raised again by the runs that reach it.
    """

    _items: _Bound = field(default_factory=_Bound)
    _tokens: _Bound = field(default_factory=_Bound)

    def out_of_memory(self, items: int, tokens: int) -> None:
        """A batch of this size was too large. Not for a number of items that was proved, nor for such a number of
        tokens, unless both were: then there is less memory than there was."""
        sizes = ((self._items, items), (self._tokens, tokens))
        suspects = [(bound, size) for bound, size in sizes if size > bound.proved]
        for bound, size in suspects or sizes:
            bound.failed(size)

    def ran(self, items: int, tokens: int, limits: BatchLimits) -> None:
        """A batch of this size ran. ``limits`` are the configured ones."""
        self._items.ran(items, limits.max_items)
        self._tokens.ran(tokens, limits.max_tokens)

    def bounded(self, limits: BatchLimits) -> BatchLimits:
        return replace(
            limits, max_items=self._items.of(limits.max_items), max_tokens=self._tokens.of(limits.max_tokens)
        )


def rung_of(items: int) -> int:
    return round(log2(items)) if items > 1 else 0


@dataclass(slots=True)
class _Rung:
    tokens: float = 0.0
    seconds: float = 0.0
    runs: int = 0
    measured_at: int = 0
    tries: int = 0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    def ran(self, tokens: int, seconds: float, at: int) -> None:
        if self.runs and at - self.measured_at > _STALE_AFTER:
            self.tokens = self.seconds = 0.0
        seconds = max(seconds, 1e-9)
        if self.seconds:
            seconds = min(seconds, _LONGEST_RUN * tokens / self.rate)
        self.tokens = KEPT_PER_RUN * self.tokens + tokens
        self.seconds = KEPT_PER_RUN * self.seconds + seconds
        self.runs += 1
        self.measured_at = at
        self.tries = 0


@dataclass(slots=True)
class BatchSizeTuner:
    """The size of batches of like items of one model. One thread at a time."""

    _rungs: dict[int, _Rung] = field(default_factory=dict)
    _settled: int | None = None
    _runs: int = 0
    _trial_rung: int | None = None
    """A neighbour that is looked at again."""
    _trial_runs: int = 0
    _since_trial: int = 0
    _interval: int = _FIRST_INTERVAL
    _upward: bool = True
    """The direction of the latest trial."""

    def wanted(self, waiting: int, max_items: int) -> int:
        """The number of items to take when so many wait, from 1 to ``max_items``."""
        if self._settled is None:
            return max_items
        reach = rung_of(min(waiting, max_items))
        if reach > self._settled and self._is_worth_a_try(reach):
            return max_items
        rung = self._settled if self._trial_rung is None else self._trial_rung
        return max_items if rung >= rung_of(max_items) else 2**rung

    def asked(self, wanted: int, waiting: int) -> None:
        """A batch was made when so many were wanted, of so many that waited. It may have become smaller than both, for
        want of room: then that was a try of the size which they allowed, and of no larger one."""
        self._rungs.setdefault(rung_of(min(wanted, waiting)), _Rung()).tries += 1

    def ran(self, items: int, tokens: int, seconds: float, max_items: int) -> None:
        if items <= 0 or tokens <= 0:
            return
        self._runs += 1
        rung = rung_of(items)
        self._rungs.setdefault(rung, _Rung()).ran(tokens, seconds, self._runs)
        before = self._settled
        self._settle()
        if self._settled is not None:
            moved = -1 if before is None else self._settled - before
            refuted = tokens / max(seconds, 1e-9) < _REFUTED * self._rungs[self._settled].rate
            self._try_neighbours(rung, rung_of(max_items), self._settled, moved, refuted=refuted)

    def _is_worth_a_try(self, rung: int) -> bool:
        known = self._rungs.get(rung)
        return known is None or (known.runs < _RUNS_TO_KNOW and known.tries < _TRIES)

    def _settle(self) -> None:
        rates = {rung: known.rate for rung, known in self._rungs.items() if known.runs >= _RUNS_TO_KNOW}
        if not rates:
            return
        best, settled = max(rates.values()), self._settled
        if settled is None or rates.get(settled, 0.0) < _LEAVE_UP * best:
            settled = min(rung for rung, rate in rates.items() if rate >= NEAR_BEST * best)
        else:
            smaller = (rung for rung, rate in rates.items() if rung < settled and rate >= _LEAVE_DOWN * best)
            settled = min(smaller, default=settled)
        self._settled = settled

    def _try_neighbours(self, ran: int, top: int, settled: int, moved: int, *, refuted: bool) -> None:
        """Look at the rungs beside that in use, when it is time to. ``moved`` is by how many rungs it was just changed:
        the next one in the same direction may be better still."""
        upward = moved > 0 if moved else not self._upward
        if moved:
            self._interval = _FIRST_INTERVAL
        self._since_trial += 1
        if self._trial_rung is not None:
            if ran == self._trial_rung:
                self._trial_runs = _RUNS_TO_KNOW if refuted else self._trial_runs + 1
            if self._trial_runs < _RUNS_TO_KNOW and not moved and self._since_trial < self._interval:
                return
            self._trial_rung, self._since_trial = None, 0
            if not moved:
                self._interval = min(_LONGEST_INTERVAL, 2 * self._interval)
        if moved or self._since_trial >= self._interval:
            self._begin_trial(settled, top, upward=upward)

    def _begin_trial(self, settled: int, top: int, *, upward: bool) -> None:
        self._trial_rung, self._trial_runs, self._since_trial = None, 0, 0
        for up in (upward, not upward):
            rung = settled + (1 if up else -1)
            if 0 <= rung <= top:
                self._trial_rung, self._upward = rung, up
                return
