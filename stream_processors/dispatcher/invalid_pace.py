"""How fast a partition may bring records that are refused or cannot be read. Pure.

Such a record costs a dispatcher as much as a good one, and nobody else may pay for it: each partition has a token
bucket, which may be overdrawn by what was read already. A partition in debt is paused until its debt is paid. Nothing
is lost: its records wait in the log. Where nobody else sends there is nobody to protect, and nothing is paused.
"""

from collections.abc import Collection
from dataclasses import dataclass, field

from fairlane.ownership import PartitionId
from fairlane_server.token_bucket import refilled

# What 16 MiB take to inflate is some 30 ms, in which nobody else's records are read.
_BYTES_PER_TOKEN = 32_768
_OTHERS_WITHIN_MS = 2_000
_BURST_S = 0.5


@dataclass(slots=True)
class InvalidPace:
    """Every operation is O(1), but for ``in_debt``, which looks at the partitions in debt."""

    per_s: int
    _levels: dict[PartitionId, tuple[float, int]] = field(default_factory=dict)
    """Tokens and when that was, of the partitions in debt or lately so."""
    _newest: tuple[PartitionId, int] | None = None
    """Whose record came last, and when."""
    _other_at_ms: int | None = None
    """When a record came last of a partition that is not the one of the newest record."""

    def arrived(self, partition: PartitionId, now_ms: int) -> None:
        """A record of this partition was read."""
        if self._newest is not None and self._newest[0] != partition:
            self._other_at_ms = self._newest[1]
        self._newest = partition, now_ms

    def charge(self, partition: PartitionId, size_bytes: int, now_ms: int) -> bool:
        """A record was refused or could not be read. Returns whether its partition is in debt since."""
        before = self._level(partition, now_ms)
        after = before - max(1.0, size_bytes / _BYTES_PER_TOKEN)
        self._levels[partition] = after, now_ms
        return after < 0 <= before

    @property
    def slow(self) -> Collection[PartitionId]:
        """The partitions that brought something invalid of late: they are read in small turns."""
        return self._levels.keys()

    def in_debt(self, now_ms: int) -> set[PartitionId]:
        """The partitions to be paused now."""
        debtors: set[PartitionId] = set()
        for partition in tuple(self._levels):
            level = self._level(partition, now_ms)
            if level >= self._capacity:
                del self._levels[partition]
            elif level < 0 and self._others_send(partition, now_ms):
                debtors.add(partition)
        return debtors

    @property
    def _capacity(self) -> float:
        return max(1.0, self.per_s * _BURST_S)

    def _level(self, partition: PartitionId, now_ms: int) -> float:
        level, at_ms = self._levels.get(partition, (self._capacity, now_ms))
        return refilled(self._capacity, self.per_s / 1_000, level, max(0, now_ms - at_ms))

    def _others_send(self, partition: PartitionId, now_ms: int) -> bool:
        if self._newest is None:
            return False
        at_ms = self._other_at_ms if self._newest[0] == partition else self._newest[1]
        return at_ms is not None and now_ms - at_ms <= _OTHERS_WITHIN_MS
