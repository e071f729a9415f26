"""Queue of one model in the micro-batcher, with its arrival rate and learned run times. Pure.

A line through the runs' tokens and seconds, older ones counting less: what a run costs whatever it holds, and what a
token adds. It knows nothing of an engine but that larger batches take longer.
"""

from dataclasses import dataclass, field
from math import inf

from inference_consumers.batching.heaps import Entry, ModelLines, Standing
from inference_consumers.batching.length_buckets import PaddingRecord
from inference_consumers.batching.limits import SafeSize
from inference_consumers.batching.priority_pick import PriorityPick
from inference_consumers.batching.size import BatchSize

KEPT_PER_ARRIVAL = 0.7


@dataclass(slots=True)
class ArrivalPace:
    """The gaps between one model's arrivals, averaged, older ones counting less."""

    _last_at_ms: int | None = None
    _gap_ms: float | None = None

    def arrived(self, at_ms: int) -> None:
        if self._last_at_ms is not None:
            gap_ms = max(0, at_ms - self._last_at_ms)
            past_ms = gap_ms if self._gap_ms is None else self._gap_ms
            self._gap_ms = KEPT_PER_ARRIVAL * past_ms + (1 - KEPT_PER_ARRIVAL) * gap_ms
        self._last_at_ms = at_ms

    def worth_waiting_ms(self, timeout_ms: int) -> int:
        """How long an item should wait for company that has so long to come: not at all when none is to be expected."""
        return timeout_ms if self._gap_ms is None or self._gap_ms < timeout_ms else 0


KEPT_PER_RUN = 0.9
"""What the past counts for after another run: after 22 it is a tenth."""

LONGEST_RUN = 4.0
"""A run counts for at most so many times what was predicted: one stall must not make everything look hopeless. A
lasting slowdown of any size is still followed."""

_LEAST_SPREAD = 0.05
"""Runs whose sizes differ less than this (standard deviation to mean) say nothing about the slope."""


@dataclass(slots=True)
class RunTimes:
    """The runs of one model. Tokens are cost in the dispatcher's unit."""

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _tokens_seconds: float = 0.0

    def ran(self, tokens: int, seconds: float) -> None:
        if self._weight > 0:
            seconds = min(seconds, LONGEST_RUN * max(self.predicted_s(tokens), 1e-6))
        self._weight = KEPT_PER_RUN * self._weight + 1
        self._tokens = KEPT_PER_RUN * self._tokens + tokens
        self._seconds = KEPT_PER_RUN * self._seconds + seconds
        self._tokens_squared = KEPT_PER_RUN * self._tokens_squared + tokens * tokens
        self._tokens_seconds = KEPT_PER_RUN * self._tokens_seconds + tokens * seconds

    def predicted_s(self, tokens: float) -> float:
        """What a run of so many tokens takes; 0 before the first."""
        base_s, per_token_s = self._line()
        return base_s + per_token_s * tokens

    @property
    def base_tokens(self) -> float:
        """How many tokens' time a run takes beside that of its tokens: so many may be wasted to save a run."""
        base_s, per_token_s = self._line()
        if base_s <= 0:
            return 0.0
        return base_s / per_token_s if per_token_s > 0 else inf

    def _line(self) -> tuple[float, float]:
        """Seconds of a run without tokens, and of one token; neither below 0."""
        if self._weight == 0:
            return 0.0, 0.0
        mean_tokens, mean_s = self._tokens / self._weight, self._seconds / self._weight
        variance = self._tokens_squared / self._weight - mean_tokens**2
        if variance <= (_LEAST_SPREAD * mean_tokens) ** 2:
            # All alike: that a token takes its part of the time is the guess that calls nothing short too long.
            return (0.0, mean_s / mean_tokens) if mean_tokens > 0 else (mean_s, 0.0)
        slope = (self._tokens_seconds / self._weight - mean_tokens * mean_s) / variance
        slope = min(max(0.0, slope), mean_s / mean_tokens)
        return mean_s - slope * mean_tokens, slope


_EARLY = 1.25
"""Latest starts are reckoned with so many times the predicted time: half of all runs take longer than predicted."""


@dataclass(slots=True)
class ModelQueue:
    """What waits for a model, and what is known of it."""

    lines: ModelLines
    times: RunTimes = field(default_factory=RunTimes)
    safe: SafeSize = field(default_factory=SafeSize)
    padding: PaddingRecord = field(default_factory=PaddingRecord)
    pace: ArrivalPace = field(default_factory=ArrivalPace)
    turns: PriorityPick = field(default_factory=PriorityPick)
    """Of a continuous engine, item by item."""
    _sizes: dict[int, BatchSize] = field(default_factory=dict)

    def size_for(self, cost_tokens: float) -> BatchSize:
        """That of items of like cost, to a factor of 4: throughput is compared between batches of the same kind."""
        return self._sizes.setdefault(max(1, round(cost_tokens)).bit_length() // 2, BatchSize())

    def predicted_ms(self, cost_tokens: int) -> float:
        return 1_000 * self.times.predicted_s(cost_tokens)

    def latest_start_ms(self, entry: Entry) -> int:
        """When it must start at the latest to finish in time, alone."""
        return int(entry.deadline_at_ms - _EARLY * self.predicted_ms(entry.cost_tokens))

    def most_urgent(self, other_than: Entry | None = None) -> tuple[int, Entry] | None:
        """The latest start that comes first, and whose it is. Of like items it is that with the first deadline."""
        urgent: tuple[int, Entry] | None = None
        for cell in self.lines.cells:
            entry = cell.soonest.first()
            if entry is None or entry is other_than:
                continue
            start_ms = self.latest_start_ms(entry)
            if urgent is None or start_ms < urgent[0]:
                urgent = start_ms, entry
        return urgent

    def judge(self, now_ms: int) -> None:
        """Tell who can still finish in time from who cannot."""
        for cell in self.lines.cells:
            while (entry := cell.soonest.first()) is not None:
                if now_ms + self.predicted_ms(entry.cost_tokens) <= entry.deadline_at_ms:
                    break
                self.lines.restand(entry, Standing.HOPELESS)
            while (entry := cell.latest.first()) is not None and now_ms <= self.latest_start_ms(entry):
                self.lines.restand(entry, Standing.HOPEFUL)
