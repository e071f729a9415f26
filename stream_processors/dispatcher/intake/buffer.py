"""Intake buffer: undecided records in one queue per partition, with fair turns and backpressure.

Partitions take turns by deficit round robin over bytes (Shreedhar and Varghese 1995). A partition is held (not read
further) while its queue exceeds a fraction of the free room (dynamic thresholds, Choudhury and Hahne 1998): room
remains for the others however many partitions flood.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from fairlane.ownership import Claim, PartitionId
from fairlane_server.kafka.transactions import TransactionLoop
from stream_processors.dispatcher.queued_request import ReceivedRecord

MAX_UNDECIDED_BYTES = 64 * 1024 * 1024

_QUANTUM_BYTES = 16_384
# Cost of a record besides its bytes: decoding, the decision, its part of a transaction.
_RECORD_COST_BYTES = 1_024
_MAX_BATCH_BYTES = 4 * 1024 * 1024
_COUNT_EVERY_BYTES = 1024 * 1024
_HOLD_PARTS = 8
_RELEASE_PARTS = 16


@dataclass(slots=True)
class _Waiting:
    records: deque[tuple[Claim, ReceivedRecord]] = field(default_factory=deque)
    size_bytes: int = 0
    deficit_bytes: int = 0


@dataclass(slots=True)
class IntakeBuffer:
    """Bounds undecided and uncommitted records, in number and bytes; admission bounds the queued requests. Everything
    runs on the event loop."""

    transactions: TransactionLoop
    max_bytes: int = MAX_UNDECIDED_BYTES
    max_records: int = 4_096
    on_change: Callable[[], None] = lambda: None
    """Called when the set of partitions to hold changes."""
    _waiting: OrderedDict[PartitionId, _Waiting] = field(default_factory=OrderedDict)
    _crowded: set[PartitionId] = field(default_factory=set)
    _records: int = 0
    _size_bytes: int = 0
    _pending_bytes: int = 0
    _uncounted_bytes: int = 0
    """Bytes added since ``_pending_bytes`` was last computed, which is expensive."""
    _room: asyncio.Event = field(default_factory=asyncio.Event)

    def __len__(self) -> int:
        return self._records

    def add(self, claim: Claim, arrival: ReceivedRecord) -> None:
        waiting = self._waiting.get(claim.partition)
        if waiting is None:
            waiting = self._waiting[claim.partition] = _Waiting()
        size = arrival.size_bytes
        waiting.records.append((claim, arrival))
        waiting.size_bytes += size
        self._records += 1
        self._size_bytes += size
        self._uncounted_bytes += size
        if claim.partition not in self._crowded and self._exceeds(waiting, _HOLD_PARTS):
            self._crowded.add(claim.partition)
            self.on_change()

    def take(self, most: int) -> list[tuple[Claim, ReceivedRecord]]:
        """Remove the next ``most`` records, or fewer once 4 MiB is reached. Partitions take turns; order is kept within
        each."""
        taken: list[tuple[Claim, ReceivedRecord]] = []
        left_bytes = _MAX_BATCH_BYTES
        while self._waiting and len(taken) < most and left_bytes > 0:
            partition, waiting = next(iter(self._waiting.items()))
            waiting.deficit_bytes += _QUANTUM_BYTES
            while waiting.records and len(taken) < most and left_bytes > 0:
                size = waiting.records[0][1].size_bytes
                cost = size + _RECORD_COST_BYTES
                if cost > waiting.deficit_bytes and len(self._waiting) > 1:
                    break
                waiting.deficit_bytes -= cost
                waiting.size_bytes -= size
                self._size_bytes -= size
                self._records -= 1
                left_bytes -= size
                taken.append(waiting.records.popleft())
            if waiting.records:
                self._waiting.move_to_end(partition)
            else:
                del self._waiting[partition]
        if self._crowded:
            self._let_go()
        return taken

    def discard(self, is_current: Callable[[Claim], bool]) -> None:
        """Drop the records of revoked partitions, and wake those waiting for room."""
        kept = [entry for waiting in self._waiting.values() for entry in waiting.records if is_current(entry[0])]
        self._waiting.clear()
        self._crowded.clear()
        self._records = self._size_bytes = 0
        for claim, arrival in kept:
            self.add(claim, arrival)
        self._room.set()

    def crowded(self) -> set[PartitionId]:
        return set(self._crowded)

    async def wait_for_room(self) -> None:
        while not self._has_room():
            self._room.clear()
            await self._room.wait()

    def on_room(self) -> None:
        """Wake those waiting for room if there is any. Spurious calls are harmless."""
        if self._has_room():
            self._room.set()

    def _let_go(self) -> None:
        left = {
            partition
            for partition in self._crowded
            if (waiting := self._waiting.get(partition)) is not None and self._exceeds(waiting, _RELEASE_PARTS)
        }
        if left != self._crowded:
            self._crowded = left
            self.on_change()

    def _exceeds(self, waiting: _Waiting, parts: int) -> bool:
        """Whether a partition's queue exceeds the free room divided by ``parts``."""
        free_records, free_bytes = self._free()
        return len(waiting.records) * parts > free_records or waiting.size_bytes * parts > free_bytes

    def _free(self) -> tuple[int, int]:
        if self._uncounted_bytes >= _COUNT_EVERY_BYTES:
            self._count_pending()
        records = self.max_records - self._records - self.transactions.pending_count
        return records, self.max_bytes - self._size_bytes - self._pending_bytes

    def _count_pending(self) -> None:
        self._pending_bytes, self._uncounted_bytes = self.transactions.pending_bytes, 0

    def _has_room(self) -> bool:
        if min(self._free()) > 0:
            return True
        self._count_pending()
        return min(self._free()) > 0
