"""Ownership: who may commit what, and two members of a group that take partitions from each other."""

from typing import Any, ClassVar

import pytest
from hypothesis import settings
from prometheus_client import REGISTRY

from fairlane.offsets import CommitPoint, Flow, OffsetTracker
from fairlane.ownership import Claim, Membership, Ownership, PartitionId
from tests.kit.group_model import NO_BOUND, NOBODY, P0, P1, P2, PARTITIONS, GroupModel

TestGroup = GroupModel.TestCase
TestGroup.settings = settings(stateful_step_count=40)


MEMBERSHIP = Membership(4, "me", b"metadata")


def owning(*partitions: PartitionId, committed: int | None = 0, max_span: int = 20_000) -> Ownership:
    ownership = Ownership(max_span)
    point = None if committed is None else CommitPoint(committed)
    ownership.assign(dict.fromkeys(partitions, point), MEMBERSHIP)
    return ownership


def deliver(ownership: Ownership, partition: PartitionId, *offsets: int) -> list[Claim]:
    claims = [ownership.deliver(partition, offset) for offset in offsets]
    assert None not in claims
    return [claim for claim in claims if claim is not None]


@pytest.mark.parametrize("nobody", [NOBODY, Membership(-1, "me", b""), Membership(3, "", b"")])
def test_nobody_never_commits(nobody: Membership) -> None:
    ownership = Ownership()
    ownership.assign({P0: CommitPoint(0)}, nobody)
    claims = deliver(ownership, P0, 0)
    ownership.advance(P0, 10)
    assert not ownership.may_commit
    assert ownership.plan(claims, NO_BOUND) is None
    assert ownership.position_plan(NO_BOUND) is None
    ownership.refresh(MEMBERSHIP)
    ownership.refresh(nobody)
    plan = ownership.plan(claims, NO_BOUND)
    assert plan is not None
    assert plan.membership is MEMBERSHIP, "the last one that counts stays; the broker fences it if it is old"


def test_claims_of_a_former_assignment_are_void() -> None:
    ownership = owning(P0)
    old = deliver(ownership, P0, 0, 1)
    ownership.revoke([P0])
    assert not ownership.is_current(old[0])
    assert ownership.plan(old, NO_BOUND) is None
    ownership.assign({P0: CommitPoint(0)}, Membership(5, "me", b""))
    new = deliver(ownership, P0, 0)
    assert ownership.plan(old, NO_BOUND) is None
    plan = ownership.plan([*old, *new], NO_BOUND)
    assert plan is not None
    assert plan.claims == tuple(new)
    assert plan.points == {P0: CommitPoint(1)}


def test_a_kept_partition_keeps_its_claims_under_the_new_generation() -> None:
    ownership = owning(P0)
    claims = deliver(ownership, P0, 0, 1)
    newer = Membership(5, "me", b"newer")
    ownership.assign({P0: CommitPoint(0), P1: None}, newer)
    plan = ownership.plan(claims[1:], NO_BOUND)
    assert plan is not None
    assert plan.membership is newer
    assert plan.points == {P0: CommitPoint(0, 0b10)}
    assert ownership.deliver(P0, 1) is None, "read again, and known"


def test_a_commit_that_is_heard_of_after_a_rebalance_settles_nothing() -> None:
    ownership = owning(P0)
    plan = ownership.plan(deliver(ownership, P0, 0), NO_BOUND)
    assert plan is not None
    ownership.revoke_all()
    ownership.assign({P0: CommitPoint(0)}, Membership(5, "me", b""))
    (again,) = deliver(ownership, P0, 0)
    ownership.settle(plan)
    assert ownership.is_current(again), "whether the old commit counts is what the broker says, not this plan"


def test_what_was_fetched_before_the_assignment_counts_for_nothing() -> None:
    ownership = owning(P0)
    earlier = ownership.epoch
    ownership.revoke([P0])
    ownership.assign({P0: CommitPoint(5)}, MEMBERSHIP)
    assert ownership.deliver(P0, 90, earlier) is None
    ownership.advance(P0, 91, earlier)
    assert ownership.resume_points() == {P0: 5}
    assert ownership.position_plan(NO_BOUND) is None
    assert ownership.deliver(P0, 5, ownership.epoch) is not None


def test_an_assignment_that_a_revocation_overtook_takes_hold_of_nothing() -> None:
    ownership = owning(P0)
    seen = ownership.revocations
    ownership.revoke([P0])
    assert not ownership.assign({P0: CommitPoint(0)}, MEMBERSHIP, unless_revoked_since=seen)
    assert ownership.partitions() == ()
    assert ownership.assign({P0: CommitPoint(0)}, MEMBERSHIP, unless_revoked_since=ownership.revocations)
    assert ownership.partitions() == (P0,)


def test_one_transaction_splits_at_the_metadata_bound() -> None:
    ownership = owning(P0, P1, P2)
    claims = [deliver(ownership, partition, *range(3_000))[-1] for partition in PARTITIONS]
    size = len(CommitPoint(0, 1 << 2_999).metadata)
    plan = ownership.plan(claims, 2 * size + 300)
    assert plan is not None
    assert plan.claims == tuple(claims[:2])
    assert sum(len(point.metadata) for point in plan.points.values()) == 2 * size
    ownership.settle(plan)
    rest = ownership.plan(claims, 2 * size + 300)
    assert rest is not None
    assert rest.claims == (claims[2],)


def test_a_bound_that_nothing_fits_still_lets_one_partition_through() -> None:
    ownership = owning(P0, P1)
    claims = [*deliver(ownership, P0, 0), *deliver(ownership, P1, 0)]
    plan = ownership.plan(claims, 1)
    assert plan is not None
    assert plan.claims == (claims[0],)


def test_what_the_bitmap_cannot_reach_waits_for_lower_offsets() -> None:
    ownership = owning(P0)
    claims = deliver(ownership, P0, *range(24_000))
    first, far = claims[0], claims[-1]
    assert not ownership.can_settle(far)
    assert ownership.plan([far], NO_BOUND) is None
    plan = ownership.plan([far, first], NO_BOUND)
    assert plan is not None
    assert plan.claims == (first,)
    ownership.settle(plan)
    ownership.settle(plan)
    assert ownership.is_current(far)
    assert not ownership.can_settle(far)
    plan = ownership.plan(claims[:200], NO_BOUND)
    assert plan is not None
    assert plan.claims == tuple(claims[1:200]), "the one that is done is left out"
    ownership.settle(plan)
    assert ownership.can_settle(far)


def test_the_same_claim_twice_is_planned_once() -> None:
    ownership = owning(P0)
    claims = deliver(ownership, P0, 0)
    plan = ownership.plan(claims * 2, NO_BOUND)
    assert plan is not None
    assert plan.claims == tuple(claims)


def test_positions_of_idle_partitions() -> None:
    ownership = owning(P0, P1, P2, committed=10)
    deliver(ownership, P0, 10)
    ownership.advance(P0, 20)
    ownership.advance(P1, 15)
    plan = ownership.position_plan(NO_BOUND)
    assert plan is not None
    assert plan.claims == ()
    assert plan.points == {P1: CommitPoint(15)}, "P0 has work to do, P2 did not move"
    ownership.settle(plan)
    assert ownership.position_plan(NO_BOUND) is None


def test_the_first_position_of_a_partition_is_committed_and_marks_are_kept() -> None:
    ownership = Ownership()
    ownership.assign({P0: None, P1: CommitPoint(3, 0b100)}, MEMBERSHIP)
    assert ownership.position_plan(NO_BOUND) is None
    ownership.advance(P0, 0)
    ownership.advance(P1, 4)
    plan = ownership.position_plan(NO_BOUND)
    assert plan is not None
    assert plan.points == {P0: CommitPoint(0), P1: CommitPoint(4, 0b10)}
    first = ownership.position_plan(1)
    assert first is not None
    assert len(first.points) == 1, "positions are bounded as well"


def test_resume_points_are_the_first_undone() -> None:
    ownership = owning(P0, committed=5)
    ownership.assign({P1: None}, MEMBERSHIP)
    claims = deliver(ownership, P0, 5, 6, 7)
    plan = ownership.plan(claims[:1], NO_BOUND)
    assert plan is not None
    ownership.settle(plan)
    assert ownership.resume_points() == {P0: 6}


def paused_gauge() -> float | None:
    return REGISTRY.get_sample_value("fairlane_partitions_paused")


def test_the_oldest_claim_of_a_full_partition_is_escalated() -> None:
    ownership = owning(P0, P1, max_span=10)
    claims = deliver(ownership, P0, *range(6))
    deliver(ownership, P1, *range(5))
    assert ownership.flow() == {}
    assert ownership.escalated() == (claims[0],)
    deliver(ownership, P0, *range(6, 12))
    assert ownership.flow() == {P0: Flow.PAUSE}
    assert ownership.paused() == (P0,)
    assert paused_gauge() == 1
    plan = ownership.plan(claims, NO_BOUND)
    assert plan is not None
    ownership.settle(plan)
    assert ownership.escalated() == (Claim(P0, 6, claims[0].epoch),)
    assert ownership.flow() == {}
    plan = ownership.plan([Claim(P0, offset, claims[0].epoch) for offset in (6, 7)], NO_BOUND)
    assert plan is not None
    ownership.settle(plan)
    assert ownership.flow() == {P0: Flow.RESUME}
    assert paused_gauge() == 0


def test_a_paused_partition_that_is_revoked_is_counted_no_more() -> None:
    ownership = owning(P0, max_span=2)
    deliver(ownership, P0, 0, 1, 2)
    assert ownership.flow() == {P0: Flow.PAUSE}
    ownership.revoke([P0])
    assert paused_gauge() == 0


class WatchedTracker(OffsetTracker):
    """Notes that it was looked at."""

    looked_at: ClassVar[set[int]] = set()

    def __getattribute__(self, name: str) -> Any:
        WatchedTracker.looked_at.add(id(self))
        return super().__getattribute__(name)


def test_partitions_that_rest_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10,000, whatever is asked again and again looks only at those that changed, and once."""
    monkeypatch.setattr("fairlane.ownership.OffsetTracker", WatchedTracker)
    partitions = [PartitionId(f"requests.tenant-{number}", 0) for number in range(10_000)]
    ownership = owning(*partitions, committed=None, max_span=4)
    for partition in partitions:
        ownership.advance(partition, 0)

    def ask() -> int:
        """How many trackers were looked at."""
        WatchedTracker.looked_at.clear()
        ownership.escalated()
        ownership.flow()
        ownership.paused()
        ownership.partitions()
        if ownership.has_positions:
            ownership.position_plan(NO_BOUND)
        return len(WatchedTracker.looked_at)

    assert ask() == 10_000
    plan = ownership.position_plan(NO_BOUND)
    assert plan is not None
    ownership.settle(plan)
    ask()
    assert ask() == 0

    claims = deliver(ownership, partitions[7], *range(5))
    deliver(ownership, partitions[8], 0)
    assert ask() == 2
    assert ask() == 0
    assert ownership.paused() == (partitions[7],)
    assert ownership.escalated() == (claims[0],)
    plan = ownership.plan(claims, NO_BOUND)
    assert plan is not None
    ownership.settle(plan)
    assert ask() == 1
    assert ask() == 0
    assert ownership.paused() == ()


def test_a_plan_of_positions_ends_where_its_bound_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fairlane.ownership.OffsetTracker", WatchedTracker)
    partitions = [PartitionId(f"requests.tenant-{number}", 0) for number in range(100)]
    ownership = owning(*partitions)
    for partition in partitions:
        ownership.advance(partition, 1)
    ownership.escalated()
    WatchedTracker.looked_at.clear()
    assert ownership.has_positions
    assert len(WatchedTracker.looked_at) == 1
    committed: set[PartitionId] = set()
    while (plan := ownership.position_plan(10 * 128)) is not None:
        assert len(plan.points) == 10
        assert not committed & plan.points.keys()
        committed |= plan.points.keys()
        ownership.settle(plan)
    assert committed == set(partitions)
    assert not ownership.has_positions


def test_partitions_are_the_same_object_until_they_change() -> None:
    ownership = owning(P0)
    before = ownership.partitions()
    deliver(ownership, P0, 0)
    assert ownership.partitions() is before
    ownership.assign({P1: None}, MEMBERSHIP)
    assert ownership.partitions() == (P0, P1)
    ownership.revoke([P0])
    assert ownership.partitions() == (P1,)
