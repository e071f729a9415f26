"""A record as it was read, before anything is decided about it."""

from dataclasses import dataclass

from fairlane.codec import DecodeError
from fairlane.ownership import PartitionId
from fairlane.records import SourceCoordinate


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

    @property
    def size_bytes(self) -> int:
        """What a tenant wrote of it: key, value and headers."""
        size = len(self.value or b"") + len(self.key or b"")
        for name, content in self.headers:
            size += len(name) + len(content or b"")
        return size

    @property
    def coordinate(self) -> SourceCoordinate:
        return SourceCoordinate(self.partition.topic, self.partition.partition, self.offset)
