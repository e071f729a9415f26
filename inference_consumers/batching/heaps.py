"""Queued items of one model in the orders that batches are formed by. Pure; no search is linear.

Items stand in heaps: by arrival, for each priority and again for each cell of like lengths, and by deadline for each
cell. Who leaves by one heap stays in the others until it comes to their top or they are swept, so that every operation
is O(log n), amortised.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum, auto
from heapq import heapify, heappop, heappush

from inference_consumers.batching.length_buckets import Cell, Shape, cell_of
from inference_consumers.batching.priority_pick import PRIORITY_WEIGHTS
from inference_consumers.batching.received_work import ModelKey, ReceivedWork

_SWEPT_AT = 64


class Standing(IntEnum):
    """What can still become of an item. Who is hopeful goes before who is not."""

    HOPEFUL = auto()
    HOPELESS = auto()
    """It could not finish in time any more if it ran at once, as far as is known."""
    EXPIRED = auto()
    GONE = auto()


WAITING = (Standing.HOPEFUL, Standing.HOPELESS)


@dataclass(slots=True, eq=False)
class Entry:
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
        self._heap: list[tuple[tuple[int, int], int, Entry]] = []
        self._pushed = 0
        self._swept_at = _SWEPT_AT

    def push(self, key: tuple[int, int], entry: Entry) -> None:
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

    def first(self) -> Entry | None:
        while self._heap:
            entry = self._heap[0][2]
            if entry.standing in self._standings:
                return entry
            heappop(self._heap)
        return None


@dataclass(slots=True)
class _Lines:
    """By arrival, of each standing and priority."""

    _heaps: dict[tuple[Standing, str], EntryHeap] = field(default_factory=dict)

    def push(self, entry: Entry) -> None:
        key = entry.standing, entry.priority
        heap = self._heaps.get(key)
        if heap is None:
            heap = self._heaps[key] = EntryHeap(entry.standing)
        heap.push(entry.arrival, entry)

    def first(self, standing: Standing, priority: str) -> Entry | None:
        heap = self._heaps.get((standing, priority))
        return None if heap is None else heap.first()


@dataclass(slots=True)
class CellLines:
    """What waits in one cell."""

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

    def push(self, entry: Entry) -> None:
        self._lines.push(entry)
        if entry.standing is Standing.HOPEFUL:
            self.soonest.push((entry.deadline_at_ms, entry.number), entry)
        else:
            self.latest.push((-entry.deadline_at_ms, entry.number), entry)

    def first(self, standing: Standing, priority: str) -> Entry | None:
        return self._lines.first(standing, priority)

    def count(self, entry: Entry, by: int) -> None:
        self.items += by
        self.prompt_tokens += by * entry.work.item.prompt_tokens
        self.cost_tokens += by * entry.cost_tokens


@dataclass(slots=True)
class ModelLines:
    """What waits for one model. ``items`` and ``cost_tokens`` leave out what has expired."""

    key: ModelKey
    items: int = 0
    cost_tokens: int = 0
    _lines: _Lines = field(default_factory=_Lines)
    _cells: dict[Cell, CellLines] = field(default_factory=dict)

    def add(self, entry: Entry) -> None:
        self.items += 1
        self.cost_tokens += entry.cost_tokens
        cell = self._cells.setdefault(entry.cell, CellLines(entry.cell))
        cell.count(entry, 1)
        cell.push(entry)
        self._lines.push(entry)

    def remove(self, entry: Entry, standing: Standing) -> None:
        """An item that waits is no longer to be run: it is gone, or expired."""
        entry.standing = standing
        self.items -= 1
        self.cost_tokens -= entry.cost_tokens
        cell = self._cells[entry.cell]
        cell.count(entry, -1)
        if not cell.items:
            del self._cells[entry.cell]

    def restand(self, entry: Entry, standing: Standing) -> None:
        """What can become of an item that waits looks different now."""
        entry.standing = standing
        self._cells[entry.cell].push(entry)
        self._lines.push(entry)

    def first(self, standing: Standing, priority: str) -> Entry | None:
        return self._lines.first(standing, priority)

    def firsts(self, standings: Iterable[Standing] = WAITING) -> Iterator[Entry]:
        for standing in standings:
            for priority in PRIORITY_WEIGHTS:
                entry = self._lines.first(standing, priority)
                if entry is not None:
                    yield entry

    @property
    def cells(self) -> Iterable[CellLines]:
        return self._cells.values()
