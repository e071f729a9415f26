"""A model of a consumer group, its broker and its log, in which two members take partitions from each other."""

from dataclasses import dataclass, field
from enum import Enum
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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

    @rule(who=WHO)
    def control_the_flow(self, who: int) -> None:
        ownership = self.members[who].ownership
        expected: dict[PartitionId, Flow] = {}
        for partition, owned in ownership._owned.items():
            if not owned.tracker.paused and owned.tracker.span > 30:
                expected[partition] = Flow.PAUSE
            elif owned.tracker.paused and owned.tracker.span < 15:
                expected[partition] = Flow.RESUME
        assert ownership.flow() == expected

    @invariant()
    def looking_at_changes_alone_is_enough(self) -> None:
        """What is kept up to date says the same as a look at everything that is owned."""
        for member in self.members:
            ownership = member.ownership
            trackers = {partition: owned.tracker for partition, owned in ownership._owned.items()}
            assert ownership.partitions() == tuple(trackers)
            assert set(ownership.paused()) == {each for each, tracker in trackers.items() if tracker.paused}
            assert {(claim.partition, claim.offset) for claim in ownership.escalated()} == {
                (partition, tracker.oldest_undone) for partition, tracker in trackers.items() if tracker.escalated
            }
            assert all(ownership.is_current(claim) for claim in ownership.escalated())
            ahead = {
                partition: point
                for partition, owned in ownership._owned.items()
                if owned.tracker.oldest_undone is None
                and (point := owned.tracker.commit_point()) is not None
                and (owned.committed is None or point.offset > owned.committed)
            }
            plan = ownership.position_plan(NO_BOUND)
            assert ownership.has_positions is (plan is not None)
            assert (plan.points if plan is not None else {}) == (ahead if ownership.may_commit else {})

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
