"""What the transaction loop is handed: a source record and what was decided about it."""

from collections.abc import Sequence
from dataclasses import dataclass

from fairlane.ownership import Claim

__all__ = ["OutRecord", "Settlement"]


@dataclass(frozen=True, slots=True)
class OutRecord:
    """A record to be written in a transaction. Without a ``partition`` its key decides."""

    topic: str
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]] = ()
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """One source record and everything that was decided about it. Both are committed, or neither."""

    claim: Claim
    outputs: tuple[OutRecord, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the outputs' values."""
        return sum(len(record.value) for record in self.outputs)

    def goes_to(self, topic: str) -> bool:
        """Whether one of the outputs is written to this topic."""
        return any(record.topic == topic for record in self.outputs)
