"""Limit per partition of invalid records, those rejected or unreadable. Pure.

An invalid record costs a dispatcher as much as a valid one, and other tenants must not pay for it. A partition is not
paused while no other partition sends: there is no tenant to protect.
"""

from dataclasses import dataclass

from fairlane.ownership import PartitionId
from stream_processors.dispatcher.intake.partition_limiter import PartitionLimiter

_OTHERS_WITHIN_MS = 2_000


@dataclass(slots=True)
class InvalidRecordLimiter(PartitionLimiter):
    """Pauses debtors while others send. Its ``slow`` partitions are read in small turns."""

    _newest: tuple[PartitionId, int] | None = None
    """Partition and time of the newest record."""
    _other_at_ms: int | None = None
    """Time of the newest record of any partition other than that of ``_newest``."""

    def arrived(self, partition: PartitionId, now_ms: int) -> None:
        """Note a record of this partition."""
        if self._newest is not None and self._newest[0] != partition:
            self._other_at_ms = self._newest[1]
        self._newest = partition, now_ms

    def in_debt(self, now_ms: int) -> set[PartitionId]:
        # Not `super()`: a dataclass with slots is another class than the one that this is compiled in.
        debtors = PartitionLimiter.in_debt(self, now_ms)
        return {partition for partition in debtors if self._others_send(partition, now_ms)}

    def _others_send(self, partition: PartitionId, now_ms: int) -> bool:
        if self._newest is None:
            return False
        at_ms = self._other_at_ms if self._newest[0] == partition else self._newest[1]
        return at_ms is not None and now_ms - at_ms <= _OTHERS_WITHIN_MS
