"""What this member of a consumer group owns: partitions, their trackers, the membership that may commit for them."""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fairlane import metrics
from fairlane.offsets import MAX_SPAN, CommitPoint, Flow, OffsetTracker

_POINT_BYTES = 128
"""What an offset takes in a transaction besides its metadata: the topic's name and the fixed fields."""


class PartitionId(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class Membership:
    """Who this member is to the group coordinator.

    A generation below 0 is nobody, and must never commit: the broker lets such a commit pass unfenced.
    """

    generation: int
    member_id: str
    group_metadata: object
    """What ``Producer.send_offsets_to_transaction`` takes."""

    @property
    def may_commit(self) -> bool:
        return self.generation >= 0 and bool(self.member_id)


class Claim(NamedTuple):
    """One delivered record, bound to the assignment it was delivered in.

    The broker checks the generation of a commit but not who owns the partition; the epoch does.
    """

    partition: PartitionId
    offset: int
    epoch: int


@dataclass(slots=True)
class _Owned:
    epoch: int
    tracker: OffsetTracker
    committed: int | None


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """What one transaction may commit: the claims still owned, and the offsets that follow from them."""

    membership: Membership
    claims: tuple[Claim, ...]
    points: Mapping[PartitionId, CommitPoint]


class Ownership:
    """Thread-safe: the polling thread assigns, delivers and revokes, the transaction thread plans and settles."""

    def __init__(self, max_span: int = MAX_SPAN) -> None:
        self._max_span = max_span
        self._lock = threading.Lock()
        self._owned: dict[PartitionId, _Owned] = {}
        self._membership: Membership | None = None
        self._epoch = 0
        self._revocations = 0

    @property
    def revocations(self) -> int:
        """How often partitions were taken away. Read it before looking up where to resume; hand it to ``assign``."""
        return self._revocations

    def assign(
        self,
        committed: Mapping[PartitionId, CommitPoint | None],
        membership: Membership,
        *,
        unless_revoked_since: int | None = None,
    ) -> bool:
        """These partitions are ours now. One that already was keeps its tracker.

        False, and nothing changed, when partitions were revoked since ``unless_revoked_since``: what was looked up may
        by now belong to somebody else, and a tracker made from it would outlive its assignment.
        """
        with self._lock:
            if unless_revoked_since is not None and unless_revoked_since != self._revocations:
                return False
            self._epoch += 1
            self._membership = membership
            for partition, point in committed.items():
                if partition not in self._owned:
                    self._owned[partition] = _Owned(
                        self._epoch, OffsetTracker(point, self._max_span), None if point is None else point.offset
                    )
            return True

    def revoke(self, partitions: Iterable[PartitionId]) -> None:
        """These are no longer ours; whatever is claimed of them is void from now on."""
        with self._lock:
            self._revocations += 1
            for partition in partitions:
                self._owned.pop(partition, None)
            self._count_paused()

    def revoke_all(self) -> None:
        with self._lock:
            self._revocations += 1
            self._owned.clear()
            self._count_paused()

    def refresh(self, membership: Membership) -> None:
        """The group moved on and this member kept its partitions. Call only from where revocations are served: a
        membership that is newer than an unserved revocation would let a former owner commit."""
        with self._lock:
            if membership.may_commit:
                self._membership = membership

    @property
    def membership(self) -> Membership | None:
        return self._membership

    @property
    def may_commit(self) -> bool:
        """Whether the group knows this member, so that a commit of it can be fenced."""
        membership = self._membership
        return membership is not None and membership.may_commit

    def partitions(self) -> tuple[PartitionId, ...]:
        with self._lock:
            return tuple(self._owned)

    @property
    def epoch(self) -> int:
        """The number of the newest assignment. A reader that hands records on later stamps them with it."""
        return self._epoch

    def assigned_after(self, epoch: int) -> tuple[PartitionId, ...]:
        """The partitions that were assigned later than this: ``deliver`` refuses what was fetched of them in it."""
        with self._lock:
            return tuple(partition for partition, owned in self._owned.items() if owned.epoch > epoch)

    def deliver(self, partition: PartitionId, offset: int, fetched_in_epoch: int | None = None) -> Claim | None:
        """A record arrived. None when it must be skipped: it is done, known already, or not ours.

        One that was fetched before its partition was assigned came from another position: taken as delivered, it would
        make everything below it a gap that counts as done.
        """
        with self._lock:
            owned = self._owned.get(partition)
            if owned is None or (fetched_in_epoch is not None and fetched_in_epoch < owned.epoch):
                return None
            if not owned.tracker.deliver(offset):
                return None
            return Claim(partition, offset, owned.epoch)

    def advance(self, partition: PartitionId, position: int, fetched_in_epoch: int | None = None) -> None:
        """The partition was read up to ``position``. Of a former assignment this says nothing, as in ``deliver``."""
        with self._lock:
            owned = self._owned.get(partition)
            if owned is not None and (fetched_in_epoch is None or fetched_in_epoch >= owned.epoch):
                owned.tracker.advance(position)

    def is_current(self, claim: Claim) -> bool:
        """Whether this claim still waits for its commit, in the assignment that delivered it."""
        with self._lock:
            return self._is_current(claim)

    def resume_points(self) -> dict[PartitionId, int]:
        """Where each owned partition is to be read from after a seek."""
        with self._lock:
            return {
                partition: first
                for partition, owned in self._owned.items()
                if (first := owned.tracker.first_undone) is not None
            }

    def flow(self) -> dict[PartitionId, Flow]:
        """Partitions whose fetching must change now."""
        with self._lock:
            changes: dict[PartitionId, Flow] = {
                partition: change
                for partition, owned in self._owned.items()
                if (change := owned.tracker.flow()) is not Flow.KEEP
            }
            if changes:
                self._count_paused()
            return changes

    def paused(self) -> tuple[PartitionId, ...]:
        with self._lock:
            return tuple(partition for partition, owned in self._owned.items() if owned.tracker.paused)

    def escalated(self) -> tuple[Claim, ...]:
        """The oldest claim of every partition that is half way to being paused: it is decided next."""
        with self._lock:
            return tuple(
                Claim(partition, oldest, owned.epoch)
                for partition, owned in self._owned.items()
                if owned.tracker.escalated and (oldest := owned.tracker.oldest_undone) is not None
            )

    def can_settle(self, claim: Claim) -> bool:
        """Whether the offset metadata can record this claim now."""
        with self._lock:
            return self._can_settle(claim)

    def plan(self, claims: Iterable[Claim], max_metadata_bytes: int) -> CommitPlan | None:
        """What may be committed of these claims, in order, within the metadata bound; None when nothing may be.

        A claim that is no longer current is left out, and so is one that its partition's bitmap cannot reach yet.
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
        """The positions of partitions in which everything is done, where they are ahead of what was committed.

        Markers and aborted records move a position without any work; committing it keeps the group's lag honest.
        """
        with self._lock:
            ahead = (
                (partition, point)
                for partition, owned in self._owned.items()
                if owned.tracker.oldest_undone is None
                and (point := owned.tracker.commit_point()) is not None
                and (owned.committed is None or point.offset > owned.committed)
            )
            return self._plan((), self._bounded(ahead, max_metadata_bytes))

    def settle(self, plan: CommitPlan) -> None:
        """The plan was committed."""
        with self._lock:
            by_partition: dict[PartitionId, list[int]] = {}
            for claim in plan.claims:
                if self._is_current(claim):
                    by_partition.setdefault(claim.partition, []).append(claim.offset)
            for partition, point in plan.points.items():
                # A plan that outlived its assignment says nothing about the present one.
                if partition in self._owned and (partition in by_partition or not plan.claims):
                    self._owned[partition].committed = point.offset
            for partition, offsets in by_partition.items():
                self._owned[partition].tracker.settle(offsets)

    def _is_current(self, claim: Claim) -> bool:
        owned = self._owned.get(claim.partition)
        return owned is not None and owned.epoch == claim.epoch and owned.tracker.is_undone(claim.offset)

    def _can_settle(self, claim: Claim) -> bool:
        return self._is_current(claim) and self._owned[claim.partition].tracker.can_settle(claim.offset)

    def _count_paused(self) -> None:
        metrics.PARTITIONS_PAUSED.set(sum(owned.tracker.paused for owned in self._owned.values()))

    @staticmethod
    def _bounded(
        wanted: Iterable[tuple[PartitionId, CommitPoint | None]], max_metadata_bytes: int
    ) -> dict[PartitionId, CommitPoint]:
        """The points that fit into one transaction, at least one of them."""
        points: dict[PartitionId, CommitPoint] = {}
        total = 0
        for partition, point in wanted:
            if point is None:
                continue
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
