"""Input of the transaction loop: source records and the output records that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass

from fairlane.ownership import Claim

__all__ = ["OutputRecord", "Settlement"]


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """A record to write in a transaction. Without ``partition``, its key decides."""

    topic: str
    key: bytes | None
    value: bytes
    headers: Sequence[tuple[str, bytes]] = ()
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Settlement:
    """One source record and its output records: all are committed, or none."""

    claim: Claim
    outputs: tuple[OutputRecord, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes of the outputs' values."""
        return sum(len(record.value) for record in self.outputs)

    def goes_to(self, topic: str) -> bool:
        """Whether one of the outputs is written to this topic."""
        return any(record.topic == topic for record in self.outputs)
