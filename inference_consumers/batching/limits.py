"""Bounds of a batch: the configured ones, and what the engine's memory has held. Pure."""

from dataclasses import dataclass, field, replace

FULL_RUNS_BEFORE_MORE = 32
"""Runs at the lowered bound that went well, before a little more is tried. Twice as many after each try that failed."""

_MOST_RUNS_BEFORE_MORE = 1_024
_GROWTH_DIVISOR = 8
_FULL = 7 / 8
"""A run counts as one at the bound from here on: a token bound is seldom hit exactly."""


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
    patience: int = FULL_RUNS_BEFORE_MORE

    def failed(self, size: int) -> None:
        """Half of what failed, or what was proved, where that is less than what failed."""
        if self.proved >= size:
            self.proved = 0
        elif self.proved > 0:
            self.patience = min(_MOST_RUNS_BEFORE_MORE, 2 * self.patience)
        safe = max(1, size // 2, self.proved)
        self.value = safe if self.value is None else min(safe, self.value)
        self.full_runs = 0

    def ran(self, size: int, limit: int) -> None:
        """A run went well. Raises the bound by an eighth after enough of them, until it is the configured one."""
        if self.value is None or size < _FULL * self.value:
            return
        self.full_runs += 1
        if self.full_runs < self.patience:
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
        """A batch of this size was not. ``limits`` are the configured ones."""
        self._items.ran(items, limits.max_items)
        self._tokens.ran(tokens, limits.max_tokens)

    def bounded(self, limits: BatchLimits) -> BatchLimits:
        return replace(
            limits, max_items=self._items.of(limits.max_items), max_tokens=self._tokens.of(limits.max_tokens)
        )
