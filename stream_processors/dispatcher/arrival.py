"""A record as it was read, before anything is decided about it."""

from dataclasses import dataclass

from fairlane.codec import DecodeError
from fairlane.ownership import PartitionId
from fairlane.records import SourceCoordinate
from stream_processors.dispatcher.reading.record_batches import memory_bytes


@dataclass(frozen=True, slots=True)
class Arrival:
    """A record as it was read from a tenant's topic."""

    partition: PartitionId
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    problem: DecodeError | None = None
    """Why it could not be read, if so; ``value`` is what can be kept of it then."""
    read_bytes: int = 0
    """What had to be read or inflated to see that."""

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        return memory_bytes(len(self.value or b"") + len(self.key or b""), self.headers)

    @property
    def cost_bytes(self) -> int:
        """What it takes in memory, or took to read."""
        return max(self.size_bytes, self.read_bytes)

    @property
    def coordinate(self) -> SourceCoordinate:
        return SourceCoordinate(self.partition.topic, self.partition.partition, self.offset)
