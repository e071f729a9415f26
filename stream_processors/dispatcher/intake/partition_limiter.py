"""Token bucket per partition. Pure.

A bucket may be overdrawn by records already read; a partition in debt is paused until the debt is refilled. Nothing is
lost: its records wait in the log.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from fairlane.ownership import PartitionId
from fairlane_server.token_bucket import refilled

# Decompressing 16 MiB takes about 30 ms, during which no other partition is read.
_BYTES_PER_TOKEN = 32_768
_BURST_S = 0.5


@dataclass(slots=True)
class PartitionLimiter:
    """Buckets by partition. Every operation is O(1) except ``in_debt``, O(partitions that were charged recently)."""

    per_s: int
    _levels: dict[PartitionId, tuple[float, int]] = field(default_factory=dict)
    """Tokens and the time of that level, for partitions whose bucket may not be full."""

    def charge(self, partition: PartitionId, size_bytes: int, now_ms: int) -> bool:
        """Charge a record. Returns whether its partition went into debt by this charge."""
        before = self._level(partition, now_ms)
        after = before - max(1.0, size_bytes / _BYTES_PER_TOKEN)
        self._levels[partition] = after, now_ms
        return after < 0 <= before

    @property
    def slow(self) -> Collection[PartitionId]:
        """Partitions that were charged recently."""
        return self._levels.keys()

    def in_debt(self, now_ms: int) -> set[PartitionId]:
        """The partitions to pause now."""
        debtors: set[PartitionId] = set()
        for partition in tuple(self._levels):
            level = self._level(partition, now_ms)
            if level >= self._capacity:
                del self._levels[partition]
            elif level < 0:
                debtors.add(partition)
        return debtors

    @property
    def _capacity(self) -> float:
        return max(1.0, self.per_s * _BURST_S)

    def _level(self, partition: PartitionId, now_ms: int) -> float:
        level, at_ms = self._levels.get(partition, (self._capacity, now_ms))
        return refilled(self._capacity, self.per_s / 1_000, level, max(0, now_ms - at_ms))
