"""An undecided record as read from Kafka."""

from dataclasses import dataclass
from typing import Self

from aiokafka.structs import ConsumerRecord

from fairlane.codec import DecodeError
from fairlane.ownership import PartitionId
from fairlane.records import SourceCoordinate
from stream_processors.dispatcher.reading.fetched_partition import Unreadable
from stream_processors.dispatcher.reading.record_batches import memory_bytes


@dataclass(frozen=True, slots=True)
class ReceivedRecord:
    """A record as read from a request, backfill or requeue topic."""

    partition: PartitionId
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()
    problem: DecodeError | None = None
    """Why the record could not be read, if so; ``value`` then holds the bytes that could be kept."""
    read_bytes: int = 0
    """Bytes read or decompressed to find that out."""

    @classmethod
    def of(cls, partition: PartitionId, record: ConsumerRecord) -> Self:
        """The record as our fetcher returns it: of one that cannot be read, ``checksum`` says why."""
        unreadable: Unreadable | None = record.checksum
        problem, read_bytes = unreadable or (None, 0)
        timestamp_ms: int = record.timestamp
        return cls(
            partition, record.offset, timestamp_ms, record.key, record.value, record.headers, problem, read_bytes
        )

    @property
    def content_bytes(self) -> int:
        """Bytes of the key, the value and the headers."""
        contents = sum(len(name) + len(content or b"") for name, content in self.headers)
        return len(self.key or b"") + len(self.value or b"") + contents

    @property
    def size_bytes(self) -> int:
        """Memory used by the record."""
        return memory_bytes(len(self.value or b"") + len(self.key or b""), self.headers)

    @property
    def cost_bytes(self) -> int:
        """Memory used by the record or bytes read for it, whichever is more."""
        return max(self.size_bytes, self.read_bytes)

    @property
    def coordinate(self) -> SourceCoordinate:
        return SourceCoordinate(self.partition.topic, self.partition.partition, self.offset)
