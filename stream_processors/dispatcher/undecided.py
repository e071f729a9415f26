"""Records that were read and are not decided yet. How many there may be, and when reading goes on."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from fairlane.ownership import Claim
from fairlane.transactions import TransactionLoop
from stream_processors.dispatcher.arrival import Arrival


@dataclass(slots=True)
class Undecided:
    """What waits for its turn is bounded by admission; this bounds what was not decided or not committed yet, in
    records and in bytes. Everything runs on the event loop."""

    transactions: TransactionLoop
    max_bytes: int
    max_records: int = 4_096
    _arrived: list[tuple[Claim, Arrival]] = field(default_factory=list)
    _room: asyncio.Event = field(default_factory=asyncio.Event)
    _read_bytes: int = 0

    def __len__(self) -> int:
        return len(self._arrived)

    def add(self, claim: Claim, arrival: Arrival) -> None:
        self._arrived.append((claim, arrival))
        self._read_bytes += len(arrival.value or b"")

    def take(self, most: int) -> list[tuple[Claim, Arrival]]:
        """The first so many, in the order in which they came."""
        taken, self._arrived = self._arrived[:most], self._arrived[most:]
        return taken

    def discard(self, is_current: Callable[[Claim], bool]) -> None:
        """Drop what is of partitions that moved on; whoever waits for room is let go."""
        self._arrived = [(claim, arrival) for claim, arrival in self._arrived if is_current(claim)]
        self._room.set()

    async def wait_for_room(self) -> None:
        """Return when more may be read."""
        while not self._has_room():
            self._room.clear()
            await self._room.wait()

    def on_room(self) -> None:
        """Something was committed or dropped: there may be room again. Spurious calls do no harm."""
        if self._has_room():
            self._room.set()

    def _has_room(self) -> bool:
        if len(self._arrived) + self.transactions.pending_count >= self.max_records:
            return False
        if self._read_bytes >= self.max_bytes:
            # Counting is dear, so it is done only when that much was read since the last time.
            self._read_bytes = self._held_bytes()
        return self._read_bytes < self.max_bytes

    def _held_bytes(self) -> int:
        return sum(len(arrival.value or b"") for _, arrival in self._arrived) + self.transactions.pending_bytes
