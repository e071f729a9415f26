"""The partitions of one consumer-group member: their offset trackers and the membership that may commit."""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from fairlane import metrics
from fairlane.frozen import frozen_dataclass
from fairlane.offsets import MAX_SPAN, CommitPoint, Flow, OffsetTracker
from fairlane.records import SourceCoordinate

_POINT_BYTES = 128
"""Size of an offset in a transaction without its metadata: topic name and fixed fields."""

_NONE_KNOWN: Mapping[str, str] = MappingProxyType({})


class PartitionId(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


@frozen_dataclass(frozen=True, slots=True)
class Membership:
    """Identity of this member at the group coordinator.

    A generation below 0 means no membership and must never commit: the broker accepts such a commit unfenced.
    """

    generation: int
    member_id: str
    group_metadata: object
    """Argument of ``Producer.send_offsets_to_transaction``."""

    @property
    def may_commit(self) -> bool:
        return self.generation >= 0 and bool(self.member_id)


class Claim(NamedTuple):
    """One delivered record, bound to the assignment that delivered it.

    The broker checks the generation of a commit but not who owns the partition; ``epoch`` does.
    """

    partition: PartitionId
    offset: int
    epoch: int

    @property
    def coordinate(self) -> SourceCoordinate:
        """Topic, partition and offset of the record."""
        return SourceCoordinate(*self.partition, self.offset)


@dataclass(slots=True)
class _Owned:
    epoch: int
    tracker: OffsetTracker
    committed: int | None
    is_stale: bool
    """The commit points to no record of this log. It is replaced at once, before the log grows past it."""


@frozen_dataclass(frozen=True, slots=True)
class CommitPlan:
    """What one transaction may commit: claims that are still owned, and the resulting offsets."""

    membership: Membership
    claims: tuple[Claim, ...]
    points: Mapping[PartitionId, CommitPoint]


class Ownership:
    """Partitions, trackers and membership of one member.

    Thread-safe: the polling thread assigns, delivers and revokes; the transaction thread plans and settles. Frequent
    calls (``escalated``, ``flow``, ``paused``, ``position_plan``) look only at partitions that changed since the last
    call: idle partitions cost nothing.
    """

    def __init__(self, max_span: int = MAX_SPAN) -> None:
        self._max_span = max_span
        self._lock = threading.Lock()
        self._owned: dict[PartitionId, _Owned] = {}
        self._partitions: tuple[PartitionId, ...] = ()
        # Dictionaries without values serve as ordered sets.
        self._changed: dict[PartitionId, None] = {}
        """Partitions with records delivered, read or settled since ``_look``."""
        self._at_rest: dict[PartitionId, None] = {}
        """Partitions that are fully done or have a stale commit: their position may have to be committed."""
        self._escalated: dict[PartitionId, Claim] = {}
        self._flow_due: dict[PartitionId, None] = {}
        """Partitions whose fetching may have to change."""
        self._paused: dict[PartitionId, None] = {}
        self._membership: Membership | None = None
        self._epoch = 0
        self._revocations = 0

    @property
    def revocations(self) -> int:
        """Number of revocations so far. Read it before looking up where to resume; pass it to ``assign``."""
        return self._revocations

    def assign(
        self,
        committed: Mapping[PartitionId, CommitPoint | None],
        membership: Membership,
        *,
        topic_ids: Mapping[str, str] = _NONE_KNOWN,
        stale: Collection[PartitionId] = (),
        unless_revoked_since: int | None = None,
    ) -> bool:
        """Take over these partitions; one that is already owned keeps its tracker.

        The topic ids are committed with the offsets. Positions of the partitions in ``stale`` are committed without
        waiting for the first work. Returns False and changes nothing when partitions were revoked since
        ``unless_revoked_since``: the positions looked up may by now belong to another member, and a tracker made from
        them would outlive its assignment.
        """
        with self._lock:
            if unless_revoked_since is not None and unless_revoked_since != self._revocations:
                return False
            self._epoch += 1
            self._membership = membership
            for partition, point in committed.items():
                if partition not in self._owned:
                    tracker = OffsetTracker(point, self._max_span, topic_ids.get(partition.topic))
                    committed_offset = None if point is None else point.offset
                    self._owned[partition] = _Owned(self._epoch, tracker, committed_offset, partition in stale)
                    self._changed[partition] = None
            self._partitions = tuple(self._owned)
            return True

    def revoke(self, partitions: Iterable[PartitionId]) -> None:
        """Give up these partitions; claims on them become void."""
        with self._lock:
            self._revoke(partitions)

    def revoke_all(self) -> None:
        with self._lock:
            self._revoke(self._partitions)

    def refresh(self, membership: Membership) -> None:
        """Store the membership of a new generation in which this member kept its partitions.

        Call only where revocations are served: with a membership newer than an unserved revocation, a former owner
        could commit.
        """
        with self._lock:
            if membership.may_commit:
                self._membership = membership

    @property
    def membership(self) -> Membership | None:
        return self._membership

    @property
    def may_commit(self) -> bool:
        """Whether the group knows this member, so that its commits can be fenced."""
        membership = self._membership
        return membership is not None and membership.may_commit

    def partitions(self) -> tuple[PartitionId, ...]:
        """The owned partitions; the same object until partitions are assigned or revoked."""
        return self._partitions

    @property
    def epoch(self) -> int:
        """Number of the newest assignment. A reader that passes records on later stamps them with it."""
        return self._epoch

    def deliver(self, partition: PartitionId, offset: int, fetched_in_epoch: int | None = None) -> Claim | None:
        """``deliver_many`` of one record."""
        return self.deliver_many(partition, (offset,), fetched_in_epoch)[0]

    def deliver_many(
        self, partition: PartitionId, offsets: Sequence[int], fetched_in_epoch: int | None = None
    ) -> list[Claim | None]:
        """Register fetched records of a partition, in order. None for each that must be skipped: done, already known,
        or not owned.

        A record fetched before its partition was assigned came from another position: if delivered, everything below it
        would become a gap that counts as done.
        """
        with self._lock:
            owned = self._owned.get(partition)
            if owned is None or (fetched_in_epoch is not None and fetched_in_epoch < owned.epoch):
                return [None] * len(offsets)
            self._changed[partition] = None
            deliver, epoch = owned.tracker.deliver, owned.epoch
            return [Claim(partition, offset, epoch) if deliver(offset) else None for offset in offsets]

    def advance(self, partition: PartitionId, position: int, fetched_in_epoch: int | None = None) -> None:
        """Note that the partition was read up to ``position``; ignored for a former assignment, as in ``deliver``."""
        with self._lock:
            owned = self._owned.get(partition)
            if owned is not None and (fetched_in_epoch is None or fetched_in_epoch >= owned.epoch):
                owned.tracker.advance(position)
                self._changed[partition] = None

    def is_current(self, claim: Claim) -> bool:
        """Whether this claim is still undone, in the assignment that delivered it."""
        with self._lock:
            return self._is_current(claim)

    def resume_points(self) -> dict[PartitionId, int]:
        """For each owned partition, the offset to read from after a seek."""
        with self._lock:
            return {
                partition: first
                for partition, owned in self._owned.items()
                if (first := owned.tracker.first_undone) is not None
            }

    def flow(self) -> dict[PartitionId, Flow]:
        """Partitions whose fetching must change now, with the change."""
        with self._lock:
            self._look()
            changes: dict[PartitionId, Flow] = {}
            for partition in self._flow_due:
                change = self._owned[partition].tracker.flow()
                if change is Flow.PAUSE:
                    self._paused[partition] = None
                elif change is Flow.RESUME:
                    del self._paused[partition]
                if change is not Flow.KEEP:
                    changes[partition] = change
            self._flow_due.clear()
            if changes:
                metrics.PARTITIONS_PAUSED.set(len(self._paused))
            return changes

    def paused(self) -> tuple[PartitionId, ...]:
        with self._lock:
            return tuple(self._paused)

    def escalated(self) -> tuple[Claim, ...]:
        """The oldest claim of every partition that is more than half way to being paused; it goes before others."""
        with self._lock:
            self._look()
            return tuple(self._escalated.values())

    def can_settle(self, claim: Claim) -> bool:
        """Whether the offset metadata can record this claim now."""
        with self._lock:
            return self._can_settle(claim)

    def plan(self, claims: Iterable[Claim], max_metadata_bytes: int) -> CommitPlan | None:
        """Plan the commit of these claims, in order and within the metadata bound; None when nothing may be committed.

        Leaves out claims that are no longer current and claims beyond the reach of their partition's bitmap.
        """
        with self._lock:
            by_partition: dict[PartitionId, list[Claim]] = {}
            for claim in dict.fromkeys(claims):
                if self._can_settle(claim):
                    by_partition.setdefault(claim.partition, []).append(claim)
            points = self._bounded(
                (
                    (partition, self._owned[partition].tracker.commit_point(claim.offset for claim in wanted))
                    for partition, wanted in by_partition.items()
                ),
                max_metadata_bytes,
            )
            return self._plan(tuple(claim for partition in points for claim in by_partition[partition]), points)

    def position_plan(self, max_metadata_bytes: int) -> CommitPlan | None:
        """Plan the commit of positions in fully done partitions, where they are ahead of the last commit.

        Transaction markers and aborted records move a position without work; committing it keeps the group's lag
        accurate.
        """
        with self._lock:
            if not self.may_commit:
                return None
            return self._plan((), self._bounded(self._ahead(), max_metadata_bytes))

    @property
    def has_positions(self) -> bool:
        """Whether ``position_plan`` has something to commit."""
        with self._lock:
            return self.may_commit and next(self._ahead(), None) is not None

    def settle(self, plan: CommitPlan) -> None:
        """Apply a committed plan."""
        with self._lock:
            by_partition: dict[PartitionId, list[int]] = {}
            for claim in plan.claims:
                if self._is_current(claim):
                    by_partition.setdefault(claim.partition, []).append(claim.offset)
            for partition, point in plan.points.items():
                # A plan from an earlier assignment does not apply to the present one.
                if partition in self._owned and (partition in by_partition or not plan.claims):
                    self._owned[partition].committed = point.offset
                    self._owned[partition].is_stale = False
            for partition, offsets in by_partition.items():
                self._owned[partition].tracker.settle(offsets)
                self._changed[partition] = None

    def _is_current(self, claim: Claim) -> bool:
        owned = self._owned.get(claim.partition)
        return owned is not None and owned.epoch == claim.epoch and owned.tracker.is_undone(claim.offset)

    def _can_settle(self, claim: Claim) -> bool:
        return self._is_current(claim) and self._owned[claim.partition].tracker.can_settle(claim.offset)

    def _revoke(self, partitions: Iterable[PartitionId]) -> None:
        self._revocations += 1
        for partition in partitions:
            self._owned.pop(partition, None)
            self._escalated.pop(partition, None)
            for noted in (self._changed, self._at_rest, self._flow_due, self._paused):
                noted.pop(partition, None)
        self._partitions = tuple(self._owned)
        metrics.PARTITIONS_PAUSED.set(len(self._paused))

    def _look(self) -> None:
        """Sort the partitions that changed since the last call."""
        for partition in self._changed:
            owned = self._owned[partition]
            oldest = owned.tracker.oldest_undone
            if oldest is None or owned.is_stale:
                self._at_rest[partition] = None
            else:
                self._at_rest.pop(partition, None)
            if oldest is not None and owned.tracker.escalated:
                self._escalated[partition] = Claim(partition, oldest, owned.epoch)
                self._flow_due[partition] = None
            else:
                self._escalated.pop(partition, None)
                if partition in self._paused:
                    self._flow_due[partition] = None
        self._changed.clear()

    def _ahead(self) -> Iterator[tuple[PartitionId, CommitPoint]]:
        """Partitions whose position is ahead of the commit, among those fully done or with a stale commit."""
        self._look()
        for partition in tuple(self._at_rest):
            owned = self._owned[partition]
            point = owned.tracker.commit_point()
            if point is None or (owned.committed is not None and point.offset <= owned.committed):
                del self._at_rest[partition]
            else:
                yield partition, point

    @staticmethod
    def _bounded(
        wanted: Iterable[tuple[PartitionId, CommitPoint | None]], max_metadata_bytes: int
    ) -> dict[PartitionId, CommitPoint]:
        """The points that fit into one transaction, at least one."""
        points: dict[PartitionId, CommitPoint] = {}
        total = 0
        for partition, point in wanted:
            if point is None:
                continue
            if total + _POINT_BYTES > max_metadata_bytes and points:
                break
            size = _POINT_BYTES + len(point.metadata)
            if points and total + size > max_metadata_bytes:
                continue
            total += size
            points[partition] = point
        return points

    def _plan(self, claims: tuple[Claim, ...], points: Mapping[PartitionId, CommitPoint]) -> CommitPlan | None:
        membership = self._membership
        if membership is None or not membership.may_commit or not points:
            return None
        return CommitPlan(membership, claims, points)
