"""Read and stored position of each owned partition. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from stream_processors.recorder.projection import LogRecord


class Partition(NamedTuple):
    """A partition of a topic."""

    topic: str
    number: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored position, and the id of the topic it is for; "" where that is not known."""

    next_offset: int
    topic_id: str = ""


@dataclass(frozen=True, slots=True)
class Move:
    """A step of a stored position: valid only from ``expected``, which makes it the fence against another recorder."""

    expected: int
    next_offset: int


@dataclass(slots=True)
class _Position:
    stored: int
    reached: int


class Positions:
    """The owned partitions. One is *placed* once it is known where to go on; until then nothing of it is accepted."""

    def __init__(self) -> None:
        self._placed: dict[Partition, _Position] = {}
        self._waiting: dict[Partition, int | None] = {}

    @property
    def waiting(self) -> Mapping[Partition, int | None]:
        """Owned, but not placed, with the offset that was last known to be stored."""
        return self._waiting

    @property
    def reached(self) -> Mapping[Partition, int]:
        """How far each placed partition is read."""
        return {partition: position.reached for partition, position in self._placed.items()}

    def own(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._waiting.setdefault(partition, None)

    def disown(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            self._waiting.pop(partition, None)
            self._placed.pop(partition, None)

    def place(self, partition: Partition, next_offset: int) -> None:
        """Reading goes on at the offset that is stored."""
        del self._waiting[partition]
        self._placed[partition] = _Position(next_offset, next_offset)

    def unplace(self, partitions: Iterable[Partition]) -> None:
        """What is stored of these is no longer certain: records beyond it will be read again."""
        for partition in partitions:
            position = self._placed.pop(partition, None)
            if position is not None:
                self._waiting[partition] = position.stored

    def accept(self, partition: Partition, offset: int) -> bool:
        """Whether a delivered record is new; then everything up to it is reached."""
        position = self._placed.get(partition)
        if position is None or offset < position.reached:
            return False
        position.reached = offset + 1
        return True

    def reach(self, partition: Partition, end: int) -> None:
        """No record before ``end`` can be delivered any more: it passes transaction markers and aborted records."""
        position = self._placed.get(partition)
        if position is not None and end > position.reached:
            position.reached = end

    def moves(self) -> dict[Partition, Move]:
        return {
            partition: Move(position.stored, position.reached)
            for partition, position in self._placed.items()
            if position.reached > position.stored
        }

    def moves_through(self, records: Iterable[LogRecord]) -> dict[Partition, Move]:
        """The steps that these records alone make, given in the order they were delivered."""
        ends = {Partition(record.topic, record.partition): record.offset + 1 for record in records}
        return {partition: Move(self._placed[partition].stored, end) for partition, end in ends.items()}

    def stored(self, moves: Mapping[Partition, Move]) -> None:
        """These steps are in the database."""
        for partition, move in moves.items():
            self._placed[partition].stored = move.next_offset
