"""A record as it was read, before anything is decided about it."""

from dataclasses import dataclass

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

    @property
    def coordinate(self) -> SourceCoordinate:
        return SourceCoordinate(self.partition.topic, self.partition.partition, self.offset)
