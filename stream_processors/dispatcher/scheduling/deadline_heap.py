"""Requests of one tenant or group, earliest deadline first. Pure."""

from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

_COMPACTED_FROM = 16
"""Removed entries kept before the heap is rebuilt without them."""

EXPEDITED = -(1 << 63)
"""Deadline that sorts before every epoch time in milliseconds."""

ItemT = TypeVar("ItemT")


class DeadlineHeap(Generic[ItemT]):
    """A heap of ``(deadline_at_ms, arrival, item)``; arrivals are unique, so ties leave in order of arrival.

    An entry with the deadline EXPEDITED goes before all others, and of two such the one pushed first. A removal out of
    turn only marks the entry; it is deleted when it reaches the head, or when more than half of the entries are marked.
    The head is never marked. Push, pop and remove are O(log n), amortised.
    """

    __slots__ = ("_gone", "entries")

    def __init__(self) -> None:
        self.entries: list[tuple[int, int, ItemT]] = []
        """``entries[0]`` is the head. Public: the queue reads it in its hot path."""
        self._gone: set[int] = set()

    def push(self, entry: tuple[int, int, ItemT]) -> None:
        heappush(self.entries, entry)

    def pop(self) -> ItemT:
        """Remove and return the head. IndexError when empty."""
        item = heappop(self.entries)[2]
        if self._gone:
            self._prune()
        return item

    def remove(self, arrival: int) -> None:
        """Remove the entry with this arrival number, which must be present."""
        self._gone.add(arrival)
        self._prune()
        if len(self._gone) > _COMPACTED_FROM and 2 * len(self._gone) > len(self.entries):
            self.entries = [entry for entry in self.entries if entry[1] not in self._gone]
            heapify(self.entries)
            self._gone.clear()

    def take_late(self, is_late: Callable[[ItemT], bool]) -> list[ItemT]:
        """Remove late entries from the head until the head is not late; expedited entries that are not late stay."""
        gone: list[ItemT] = []
        passed: list[tuple[int, int, ItemT]] = []
        while self.entries:
            entry = self.entries[0]
            if is_late(entry[2]):
                gone.append(self.pop())
            elif entry[0] == EXPEDITED:
                passed.append(entry)
                self.pop()
            else:
                break
        for entry in passed:
            self.push(entry)
        return gone

    def __iter__(self) -> Iterator[tuple[int, int, ItemT]]:
        """All entries, in no order."""
        return (entry for entry in self.entries if entry[1] not in self._gone)

    def __len__(self) -> int:
        return len(self.entries) - len(self._gone)

    def _prune(self) -> None:
        entries, gone = self.entries, self._gone
        while entries and entries[0][1] in gone:
            gone.discard(heappop(entries)[1])
