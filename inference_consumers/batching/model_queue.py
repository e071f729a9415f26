"""Queue of one model in the micro-batcher: items in the orders that batches are formed by, and run times. Pure.

Items are in heaps: by arrival, for each priority and again for each cell of similar lengths, and by deadline for each
cell. An item that leaves by one heap stays in the others until it comes to their top or they are swept, so that every
operation is O(log n), amortised.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, auto
from heapq import heapify, heappop, heappush
from math import ceil, inf

from inference_consumers.batching.batch_size import BatchSizeTuner, SafeSize
from inference_consumers.batching.length_buckets import Cell, PaddingRecord, Shape, cell_of
from inference_consumers.batching.priority_pick import PRIORITY_WEIGHTS, PriorityPick
from inference_consumers.batching.received_work import ModelKey, ReceivedWork

_SWEPT_AT = 64


class Standing(IntEnum):
    """What can still become of an item: a hopeful one goes before a hopeless one."""

    HOPEFUL = auto()
    HOPELESS = auto()
    """As far as is known, it could not finish in time even if it ran at once."""
    EXPIRED = auto()
    GONE = auto()


WAITING = (Standing.HOPEFUL, Standing.HOPELESS)


@dataclass(slots=True, eq=False)
class QueuedItem:
    """An item that waits. ``number`` counts arrivals."""

    work: ReceivedWork
    number: int
    cell: Cell = field(init=False)
    standing: Standing = Standing.HOPEFUL

    def __post_init__(self) -> None:
        self.cell = cell_of(self.work)

    @property
    def priority(self) -> str:
        return self.work.item.priority_class

    @property
    def deadline_at_ms(self) -> int:
        return self.work.item.deadline_at_ms

    @property
    def cost_tokens(self) -> int:
        return self.work.item.cost_tokens

    @property
    def arrival(self) -> tuple[int, int]:
        return self.work.received_at_ms, self.number


class EntryHeap:
    """Entries of some standings by a key; the others among them do not count."""

    __slots__ = ("_heap", "_pushed", "_standings", "_swept_at")

    def __init__(self, *standings: Standing) -> None:
        self._standings = frozenset(standings)
        self._heap: list[tuple[tuple[int, int], int, QueuedItem]] = []
        self._pushed = 0
        self._swept_at = _SWEPT_AT

    def push(self, key: tuple[int, int], entry: QueuedItem) -> None:
        """An entry may be in here more than once."""
        if len(self._heap) >= self._swept_at:
            # Of an entry that was pushed again, one copy is enough.
            kept = {one.number: (at, pushed, one) for at, pushed, one in self._heap if one.standing in self._standings}
            self._heap = list(kept.values())
            heapify(self._heap)
            self._swept_at = max(_SWEPT_AT, 2 * len(self._heap))
        self._pushed += 1
        heappush(self._heap, (key, self._pushed, entry))

    def __len__(self) -> int:
        """Entries held, with those that do not count any more."""
        return len(self._heap)

    def first(self) -> QueuedItem | None:
        while self._heap:
            entry = self._heap[0][2]
            if entry.standing in self._standings:
                return entry
            heappop(self._heap)
        return None


class _Lines(dict[tuple[Standing, str], EntryHeap]):
    """By arrival, of each standing and priority."""

    def __missing__(self, key: tuple[Standing, str]) -> EntryHeap:
        heap = self[key] = EntryHeap(key[0])
        return heap

    def push(self, entry: QueuedItem) -> None:
        self[entry.standing, entry.priority].push(entry.arrival, entry)


@dataclass(slots=True)
class CellLines:
    """Waiting items of one cell."""

    cell: Cell
    _lines: _Lines = field(default_factory=_Lines)
    soonest: EntryHeap = field(default_factory=lambda: EntryHeap(Standing.HOPEFUL))
    """By deadline."""
    latest: EntryHeap = field(default_factory=lambda: EntryHeap(Standing.HOPELESS))
    """By deadline, the latest first."""
    items: int = 0
    prompt_tokens: int = 0
    cost_tokens: int = 0

    @property
    def shape(self) -> Shape:
        """Everything here in one batch; as if one prompt were as long as they get here."""
        longest = self.cell.longest_prompt_tokens if self.prompt_tokens else 0
        return Shape(self.items, longest, self.prompt_tokens, self.cost_tokens)

    def push(self, entry: QueuedItem) -> None:
        self._lines.push(entry)
        if entry.standing is Standing.HOPEFUL:
            self.soonest.push((entry.deadline_at_ms, entry.number), entry)
        else:
            self.latest.push((-entry.deadline_at_ms, entry.number), entry)

    def first(self, standing: Standing, priority: str) -> QueuedItem | None:
        return self._lines[standing, priority].first()

    def count(self, entry: QueuedItem, by: int) -> None:
        self.items += by
        self.prompt_tokens += by * entry.work.item.prompt_tokens
        self.cost_tokens += by * entry.cost_tokens


_KEPT_PER_ARRIVAL = 0.7


@dataclass(slots=True)
class _ArrivalPace:
    """The gaps between one model's arrivals, averaged, older ones counting less."""

    _last_at_ms: int | None = None
    _gap_ms: float | None = None

    def arrived(self, at_ms: int) -> None:
        if self._last_at_ms is not None:
            gap_ms = max(0, at_ms - self._last_at_ms)
            past_ms = gap_ms if self._gap_ms is None else self._gap_ms
            self._gap_ms = _KEPT_PER_ARRIVAL * past_ms + (1 - _KEPT_PER_ARRIVAL) * gap_ms
        self._last_at_ms = at_ms

    def worth_waiting_ms(self, timeout_ms: int) -> int:
        """How long an item should wait for others, at most ``timeout_ms``: not at all when none is expected by then."""
        return timeout_ms if self._gap_ms is None or self._gap_ms < timeout_ms else 0


_KEPT_PER_RUN = 0.9
"""What the past counts for after another run: after 22 it is a tenth."""

_LONGEST_RUN = 4.0
"""A run counts for at most so many times what was predicted: one stall must not make everything look hopeless. A
lasting slowdown of any size is still followed."""

_LEAST_SPREAD = 0.05
"""Runs whose sizes differ less than this (standard deviation to mean) say nothing about the slope."""


@dataclass(slots=True)
class RunTimes:
    """Predicted times of one model's runs: a line through their tokens and seconds, older ones counting less. It is
    what a run costs whatever it holds, and what a token adds. Tokens are cost in the dispatcher's unit.

    Nothing is known of an engine but that larger batches take longer.
    """

    _weight: float = 0.0
    _tokens: float = 0.0
    _seconds: float = 0.0
    _tokens_squared: float = 0.0
    _tokens_seconds: float = 0.0

    def ran(self, tokens: int, seconds: float) -> None:
        if self._weight > 0:
            seconds = min(seconds, _LONGEST_RUN * max(self.predicted_s(tokens), 1e-6))
        self._weight = _KEPT_PER_RUN * self._weight + 1
        self._tokens = _KEPT_PER_RUN * self._tokens + tokens
        self._seconds = _KEPT_PER_RUN * self._seconds + seconds
        self._tokens_squared = _KEPT_PER_RUN * self._tokens_squared + tokens * tokens
        self._tokens_seconds = _KEPT_PER_RUN * self._tokens_seconds + tokens * seconds

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
    """Items that wait for one model, and its learned times and sizes. ``items`` and ``cost_tokens`` leave out what has
    expired."""

    key: ModelKey
    items: int = 0
    cost_tokens: int = 0
    times: RunTimes = field(default_factory=RunTimes)
    safe: SafeSize = field(default_factory=SafeSize)
    padding: PaddingRecord = field(default_factory=PaddingRecord)
    pace: _ArrivalPace = field(default_factory=_ArrivalPace)
    turns: PriorityPick = field(default_factory=PriorityPick)
    """Of a continuous engine, item by item."""
    _sizes: dict[int, BatchSizeTuner] = field(default_factory=dict)
    _lines: _Lines = field(default_factory=_Lines)
    _cells: dict[Cell, CellLines] = field(default_factory=dict)

    def add(self, entry: QueuedItem) -> None:
        self.items += 1
        self.cost_tokens += entry.cost_tokens
        cell = self._cells.setdefault(entry.cell, CellLines(entry.cell))
        cell.count(entry, 1)
        cell.push(entry)
        self._lines.push(entry)

    def remove(self, entry: QueuedItem, standing: Standing) -> None:
        """An item that waits is no longer to be run: it is gone, or expired."""
        entry.standing = standing
        self.items -= 1
        self.cost_tokens -= entry.cost_tokens
        cell = self._cells[entry.cell]
        cell.count(entry, -1)
        if not cell.items:
            del self._cells[entry.cell]

    def restand(self, entry: QueuedItem, standing: Standing) -> None:
        """What can become of an item that waits looks different now."""
        entry.standing = standing
        self._cells[entry.cell].push(entry)
        self._lines.push(entry)

    def firsts(self, standings: Iterable[Standing] = WAITING) -> Iterator[QueuedItem]:
        for standing in standings:
            for priority in PRIORITY_WEIGHTS:
                entry = self._lines[standing, priority].first()
                if entry is not None:
                    yield entry

    @property
    def cells(self) -> Iterable[CellLines]:
        return self._cells.values()

    def size_for(self, cost_tokens: float) -> BatchSizeTuner:
        """That of items of like cost, to a factor of 4: throughput is compared between batches of the same kind."""
        return self._sizes.setdefault(max(1, round(cost_tokens)).bit_length() // 2, BatchSizeTuner())

    def worth_waiting_ms(self, timeout_ms: int) -> int:
        """How long the waiting items should wait for others: at most ``timeout_ms``, not at all when none is expected
        by then, and no longer than a run of theirs takes. A joined batch saves at most one run, so a longer wait could
        cost more than it saves (ski rental: Karlin, Manasse, Rudolph and Sleator 1988)."""
        expected_ms = self.pace.worth_waiting_ms(timeout_ms)
        run_ms = ceil(self.predicted_ms(self.cost_tokens))
        return min(expected_ms, run_ms) if run_ms else expected_ms

    def predicted_ms(self, cost_tokens: int) -> float:
        return 1_000 * self.times.predicted_s(cost_tokens)

    def latest_start_ms(self, entry: QueuedItem) -> int:
        """When it must start at the latest to finish in time, alone."""
        return int(entry.deadline_at_ms - _EARLY * self.predicted_ms(entry.cost_tokens))

    def most_urgent(self, other_than: QueuedItem | None = None) -> tuple[int, QueuedItem] | None:
        """The latest start that comes first, and whose it is. Of like items it is that with the first deadline."""
        urgent: tuple[int, QueuedItem] | None = None
        for cell in self.cells:
            entry = cell.soonest.first()
            if entry is None or entry is other_than:
                continue
            start_ms = self.latest_start_ms(entry)
            if urgent is None or start_ms < urgent[0]:
                urgent = start_ms, entry
        return urgent

    def judge(self, now_ms: int) -> None:
        """Update which items can still finish in time."""
        for cell in self.cells:
            while (entry := cell.soonest.first()) is not None:
                if now_ms + self.predicted_ms(entry.cost_tokens) <= entry.deadline_at_ms:
                    break
                self.restand(entry, Standing.HOPELESS)
            while (entry := cell.latest.first()) is not None and now_ms <= self.latest_start_ms(entry):
                self.restand(entry, Standing.HOPEFUL)
