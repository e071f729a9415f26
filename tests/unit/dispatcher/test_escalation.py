"""The oldest record of a partition that would block goes first among its own, and nobody else notices."""

from collections import Counter, deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.names import priority_topic, requests_topic
from fairlane.offsets import MAX_SPAN, Flow
from fairlane.ownership import Claim, Membership, Ownership, PartitionId
from fairlane.records import TenantSpec
from stream_processors.dispatcher.admission.rules import AdmissionPolicy, Shed
from stream_processors.dispatcher.scheduling.fair_queue import DEFAULT_QUANTUM_TOKENS, Policy, service_gap_bound
from tests.kit.scheduler_kit import POOL, Kit, Request, capacity_report

RATE = 10_000
COST = 100
STEP_MS = 10
NO_BOUND = 10**9

Line = tuple[str, str]
COSTS: dict[Line, int] = {("a", "high"): 300, ("a", "low"): 40, ("b", "high"): 70, ("b", "low"): 500, ("c", "low"): 90}
"""Every request of a line costs the same, so that their order within the line shows in nothing else."""


# Whoever is escalated, whenever


class Books:
    """One scheduler, what waits for it and what it served."""

    def __init__(self, policy: Policy) -> None:
        self.kit = Kit(policy, [TenantSpec("a"), TenantSpec("b"), TenantSpec("c")])
        self.kit.report(capacity_report(rate=0.0, items=4, tokens=600))
        self.waiting: list[Request] = []
        self.in_flight: list[Request] = []
        self.served: Counter[Line] = Counter()

    def push(self, line: Line, deadline_at_ms: int) -> None:
        tenant, priority_class = line
        cost = COSTS[line]
        self.waiting.append(
            self.kit.push(
                tenant,
                priority_class=priority_class,
                cost_tokens=cost,
                prompt_tokens=cost,
                deadline_at_ms=1_000 + deadline_at_ms,
            )
        )

    def dispatch(self, escalated: list[Request]) -> list[Line]:
        lines: list[Line] = []
        for turn in self.kit.turns(*(request.claim for request in escalated)):
            item, view = turn.item, turn.view
            assert view.in_flight_tokens + item.cost_tokens <= view.window_tokens or view.in_flight_tokens == 0
            self.waiting.remove(item)
            self.in_flight.append(item)
            lines.append((item.tenant, item.priority_class))
            self.served[lines[-1]] += item.cost_tokens
        return lines

    def settle(self, count: int) -> None:
        done, self.in_flight = self.in_flight[:count], self.in_flight[count:]
        for item in done:
            self.kit.settle(item)


@pytest.mark.parametrize("policy", ["drr", "vtc"])
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.tuples(st.sampled_from(sorted(COSTS)), st.integers(0, 9)), max_size=8),
            st.lists(st.integers(0, 1_000), max_size=4),
            st.integers(0, 6),
        ),
        min_size=5,
        max_size=40,
    )
)
def test_escalation_changes_no_turn_but_within_a_line(
    policy: Policy, steps: list[tuple[list[tuple[Line, int]], list[int], int]]
) -> None:
    """The window holds, and whose turn it is is the same to the last one as without; so is every bound of that."""
    with_it, without = Books(policy), Books(policy)
    for pushed, escalated, done in steps:
        for books in (with_it, without):
            for line, deadline_at_ms in pushed:
                books.push(line, deadline_at_ms)
        chosen = [with_it.waiting[number % len(with_it.waiting)] for number in escalated if with_it.waiting]
        assert with_it.dispatch(chosen) == without.dispatch([])
        for books in (with_it, without):
            books.settle(done)


@given(
    deadlines=st.lists(st.integers(0, 9), min_size=120, max_size=120),
    escalated=st.lists(st.lists(st.integers(0, 1_000), max_size=5), min_size=30, max_size=30),
)
def test_tenants_with_work_stay_within_the_bound(deadlines: list[int], escalated: list[list[int]]) -> None:
    books = Books("drr")
    for line in (("a", "low"), ("b", "low")):
        for deadline_at_ms in deadlines:
            books.push(line, deadline_at_ms)
    bound = service_gap_bound(DEFAULT_QUANTUM_TOKENS, max(COSTS.values()), 1.0, 1.0)
    for numbers in escalated:
        books.dispatch([books.waiting[number % len(books.waiting)] for number in numbers])
        assert abs(books.served["a", "low"] - books.served["b", "low"]) <= bound
        books.settle(2)
        assert {item.tenant for item in books.waiting} == {"a", "b"}


# A flood, as the dispatcher meets it


class Flood:
    """A pool of RATE tokens a second, a flooder that sends many times that, and a victim just below its half.

    What is refused of the flood is settled at once, so that its oldest waiting request soon lies far behind its newest.
    """

    def __init__(self, max_span: int) -> None:
        specs = [TenantSpec("flood", max_queue_requests=400), TenantSpec("victim")]
        self.kit = Kit(specs=specs, admission=AdmissionPolicy(max_waiting_requests=1_000))
        self.kit.in_flight.set_partitions(priority_topic(POOL, "normal"), 1)
        self.ownership = Ownership(max_span)
        self.partitions = {name: PartitionId(requests_topic(name), 0) for name in ("flood", "victim")}
        self.ownership.assign(dict.fromkeys(self.partitions.values()), Membership(1, "me", None))
        self.log = Counter[str]()
        """Written to each partition."""
        self.read = Counter[str]()
        self.paused: set[PartitionId] = set()
        self.in_flight: deque[Request] = deque()
        self.served = Counter[str]()
        self.refused = Counter[str]()
        self.escalated = Counter[str]()

    def run(self, per_s: dict[str, int], until_ms: int) -> None:
        capacity = 0
        for now_ms in range(0, until_ms, STEP_MS):
            self.kit.now_ms = now_ms
            self.kit.report(capacity_report(rate=RATE, items=10, tokens=RATE))
            self.kit.scheduler.refresh(now_ms)
            for name, rate in per_s.items():
                self.log[name] = rate * now_ms // 1_000
            done = [claim for name in per_s for claim in self._intake(name)]
            first = self.ownership.escalated()
            self.escalated.update(claim.partition.topic for claim in first)
            for turn in self.kit.turns(*first):
                assert not turn.is_late
                self.in_flight.append(turn.item)
                done.append(turn.item.claim)
            if (plan := self.ownership.plan(done, NO_BOUND)) is not None:
                self.ownership.settle(plan)
            if now_ms % 200 == 0:
                self._control_the_flow()
            capacity = min(capacity + RATE * STEP_MS // 1_000, RATE)
            while self.in_flight and capacity >= COST:
                capacity -= COST
                self.kit.settle(item := self.in_flight.popleft())
                self.served[item.tenant] += 1

    def _intake(self, name: str) -> list[Claim]:
        """Read what was written. Returns what was refused: that is done at once."""
        partition = self.partitions[name]
        refused: list[Claim] = []
        while partition not in self.paused and self.read[name] < self.log[name]:
            claim = self.ownership.deliver(partition, self.read[name])
            assert claim is not None
            self.read[name] += 1
            now_ms = self.kit.now_ms
            item = Request(claim, name, cost_tokens=COST, submitted_at_ms=now_ms, deadline_at_ms=now_ms + 600_000)
            if isinstance(self.kit.judge(item), Shed):
                self.refused[name] += 1
                refused.append(claim)
            else:
                self.kit.scheduler.push(item)
        return refused

    def _control_the_flow(self) -> None:
        for partition, change in self.ownership.flow().items():
            (self.paused.add if change is Flow.PAUSE else self.paused.discard)(partition)


@pytest.mark.parametrize("times", [4, 40])
def test_a_flooder_whose_partition_would_block_takes_nothing_from_another_tenant(times: int) -> None:
    flood_per_s = times * RATE // COST
    flood = Flood(max_span=min(5 * flood_per_s, MAX_SPAN))
    flood.run({"flood": flood_per_s, "victim": 45}, 12_000)
    assert flood.escalated[requests_topic("flood")] > 100
    assert flood.refused["victim"] == flood.escalated[requests_topic("victim")] == 0
    assert flood.refused["flood"] > flood.served["flood"] > 0
    assert flood.served["victim"] >= 0.97 * flood.log["victim"]
    assert flood.paused <= {flood.partitions["flood"]}
