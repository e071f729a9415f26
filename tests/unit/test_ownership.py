"""Ownership: two members of a group that take partitions from each other, and the rules of one commit."""

from dataclasses import dataclass, field
from enum import Enum
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from prometheus_client import REGISTRY

from fairlane.offsets import MAX_METADATA_CHARS, CommitPoint, Flow
from fairlane.ownership import Claim, CommitPlan, Membership, Ownership, PartitionId

PARTITIONS = tuple(PartitionId("work", number) for number in range(3))
P0, P1, P2 = PARTITIONS
NOBODY = Membership(-1, "", b"")
NO_BOUND = 10**9


class Ending(Enum):
    """How a commit ends for the member that began it."""

    SUCCEEDS = "succeeds"
    FAILS = "fails"
    UNHEARD = "it succeeds, and the member crashes before it hears of that"


@dataclass
class Broker:
    """The group as its coordinator knows it, with every weakness that the real one has: it checks the generation of a
    commit, never who owns the partition, and it lets generation -1 pass."""

    generation: int = 0
    members: set[str] = field(default_factory=set)
    committed: dict[PartitionId, tuple[int, str]] = field(default_factory=dict)
    done: dict[PartitionId, list[int]] = field(default_factory=lambda: {partition: [] for partition in PARTITIONS})

    def commit(self, plan: CommitPlan) -> bool:
        """Whether the transaction was committed: offsets, and the work of the plan's claims."""
        membership = plan.membership
        if membership.generation >= 0 and (
            membership.member_id not in self.members or membership.generation != self.generation
        ):
            return False
        for claim in plan.claims:
            self.done[claim.partition].append(claim.offset)
        for partition, point in plan.points.items():
            assert len(point.metadata) <= MAX_METADATA_CHARS
            self.committed[partition] = (point.offset, point.metadata)
        return True

    def resume(self, partition: PartitionId) -> CommitPoint | None:
        found = self.committed.get(partition)
        return None if found is None else CommitPoint.parse(*found)


@dataclass
class Member:
    """One process: its ownership, the work it holds, and the transaction that is under way."""

    name: str
    ownership: Ownership = field(default_factory=lambda: Ownership(max_span=30))
    positions: dict[PartitionId, int] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)
    """Everything it ever took and did not commit, of assignments long gone as well."""

    def crash(self) -> None:
        self.ownership = Ownership(max_span=30)
        self.positions, self.claims = {}, []


@dataclass(frozen=True)
class Rebalance:
    """The group moves on with the members in ``alive``; whoever is left out is a zombie and knows nothing of it.

    ``owners`` says by a bit who gets a partition. A cooperative member keeps the partitions that stay its own.
    """

    alive: int
    owners: int
    cooperative: bool


REBALANCES = st.builds(Rebalance, st.sampled_from((1, 2, 3, 3, 3)), st.integers(0, 7), st.booleans())
WHO = st.integers(0, 1)


class GroupModel(RuleBasedStateMachine):
    """Every record is done once, whoever owns its partition when, and whoever believes to."""

    def __init__(self) -> None:
        super().__init__()
        self.broker = Broker()
        self.members = [Member("a"), Member("b")]
        self.end = dict.fromkeys(PARTITIONS, 0)
        self.records: dict[PartitionId, list[int]] = {partition: [] for partition in PARTITIONS}

    @initialize(counts=st.lists(st.integers(1, 40), min_size=3, max_size=3), rebalance=REBALANCES)
    def begin(self, counts: list[int], rebalance: Rebalance) -> None:
        for partition, count in zip(PARTITIONS, counts, strict=True):
            self.write(partition, count, 1)
        self.rebalance(rebalance)

    @rule(partition=st.sampled_from(PARTITIONS), count=st.integers(1, 20), gap=st.sampled_from((0, 1, 5, 10**6)))
    def write(self, partition: PartitionId, count: int, gap: int) -> None:
        end = self.end[partition]
        self.records[partition].extend(range(end, end + count))
        self.end[partition] = end + count + gap

    @rule(to=REBALANCES)
    def rebalance(self, to: Rebalance) -> None:
        living = [member for number, member in enumerate(self.members) if to.alive >> number & 1]
        owner = {
            partition: living[(to.owners >> number & 1) % len(living)] for number, partition in enumerate(PARTITIONS)
        }
        for member in living:
            held = set(member.ownership.partitions())
            stays = to.cooperative and member.name in self.broker.members
            kept = {partition for partition in held if stays and owner[partition] is member}
            member.ownership.revoke(held - kept)
        self.broker.generation += 1
        self.broker.members = {member.name for member in living}
        for member in living:
            membership = Membership(self.broker.generation, member.name, b"")
            new = {partition for partition in PARTITIONS if owner[partition] is member}
            new -= set(member.ownership.partitions())
            found = {partition: self.broker.resume(partition) for partition in new}
            if found:
                member.ownership.assign(found, membership)
            else:
                member.ownership.refresh(membership)
            member.positions.update((partition, point.offset if point else 0) for partition, point in found.items())

    @rule(who=WHO, crashed=st.booleans(), assigned=st.booleans())
    def fall_out(self, who: int, *, crashed: bool, assigned: bool) -> None:
        """The client reports that it is nobody, and the member believes that what it holds is still its own; or the
        process starts again, and may even be told of partitions before it has a generation."""
        member = self.members[who]
        if not crashed:
            member.ownership.refresh(NOBODY)
            return
        member.crash()
        if assigned:
            point = self.broker.resume(P0)
            member.ownership.assign({P0: point}, NOBODY)
            member.positions[P0] = point.offset if point else 0

    def read(self, member: Member, count: int) -> None:
        for partition in member.ownership.partitions():
            position = member.positions.get(partition, 0)
            arriving = [offset for offset in self.records[partition] if offset >= position][:count]
            member.claims.extend(
                claim for offset in arriving if (claim := member.ownership.deliver(partition, offset)) is not None
            )
            if arriving:
                member.positions[partition] = arriving[-1] + 1
            else:
                member.ownership.advance(partition, self.end[partition])

    @rule(
        who=WHO,
        chance=st.sampled_from((0.5, 0.1, 0.9, 1.0, 0.0)),
        random=st.randoms(use_true_random=False),
        bound=st.sampled_from((1, 300, NO_BOUND)),
        before=st.none() | REBALANCES,
        ending=st.sampled_from(tuple(Ending)),
        after=st.none() | REBALANCES,
    )
    def read_and_commit(
        self,
        who: int,
        chance: float,
        random: Random,
        bound: int,
        before: Rebalance | None,
        ending: Ending,
        after: Rebalance | None,
    ) -> None:
        """Read on, and commit whatever is finished, claims of former assignments included. The group may move on while
        it is under way, and again before the member hears that it was committed."""
        member = self.members[who]
        self.read(member, 10)
        finished = [claim for claim in member.claims if random.random() < chance]
        random.shuffle(finished)
        plan = member.ownership.plan(finished, bound) if finished else member.ownership.position_plan(bound)
        if plan is None:
            return
        assert set(plan.claims) <= set(finished)
        assert {claim.partition for claim in plan.claims} <= set(plan.points)
        if before is not None:
            self.rebalance(before)
            self.read(member, 10)
        if ending is Ending.FAILS or not self.broker.commit(plan):
            return
        if after is not None:
            self.rebalance(after)
            self.read(member, 10)
        if ending is Ending.UNHEARD:
            member.crash()
            return
        member.ownership.settle(plan)
        assert not any(member.ownership.is_current(claim) for claim in plan.claims)
        assert member.ownership.plan(plan.claims, NO_BOUND) is None, "what is done is never committed again"

    @precondition(lambda self: self.broker.generation > 0)
    @invariant()
    def commits_are_honest(self) -> None:
        for partition in PARTITIONS:
            done = self.broker.done[partition]
            assert len(done) == len(set(done)), f"{partition} has records that were done twice"
            point = self.broker.resume(partition) or CommitPoint(0)
            for offset in self.records[partition]:
                marked = offset < point.offset or bool(point.done_beyond >> (offset - point.offset) & 1)
                assert marked is (offset in done), f"{partition}@{offset}"

    def teardown(self) -> None:
        """A last member finishes everything, while the others still believe what they like."""
        last = Member("last")
        self.members = [last, *self.members]
        self.rebalance(Rebalance(1, 0, cooperative=False))
        self.read(last, max(len(records) for records in self.records.values()))
        while last.claims:
            plan = last.ownership.plan(last.claims, NO_BOUND)
            assert plan is not None
            assert self.broker.commit(plan)
            last.ownership.settle(plan)
            last.claims = [claim for claim in last.claims if last.ownership.is_current(claim)]
        for partition, records in self.records.items():
            assert sorted(self.broker.done[partition]) == records


TestGroup = GroupModel.TestCase
TestGroup.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


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
    plan = ownership.plan(claims[:100], NO_BOUND)
    assert plan is not None
    assert plan.claims == tuple(claims[1:100]), "the one that is done is left out"
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
