"""What every fairness policy does alike: nothing is lost, repeated or jumped over, and the sums are right."""

from math import inf, nan
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fairlane.records import TenantGroup
from stream_processors.dispatcher.scheduling.backlog_statistics import Backlog, Share
from stream_processors.dispatcher.scheduling.fair_queue import FairQueue, Policy, make_fair_queue
from stream_processors.dispatcher.scheduling.share_tree import Node, ShareTree
from tests.kit.fair_queue_watch import Request, never

POLICIES: tuple[Policy, ...] = get_args(Policy)
SHARES = (
    None,
    Share(3.0),
    Share(0.1, (TenantGroup("search", 2.0),)),
    Share(1.0, (TenantGroup("chat", 1.0), TenantGroup("search", 0.5, "chat"))),
)


@pytest.fixture(params=POLICIES)
def queue(request: pytest.FixtureRequest) -> FairQueue[Request]:
    made: FairQueue[Request] = make_fair_queue(request.param)
    return made


def test_it_is_empty_at_first(queue: FairQueue[Request]) -> None:
    assert len(queue) == 0
    assert queue.pop(inf, never) is None
    assert queue.total == queue.waiting("a", "high") == queue.waiting_in_class("low") == Backlog()
    assert queue.backlogged_weight("normal") == 0.0
    assert queue.busiest(10) == []


def test_what_is_pushed_leaves_once(queue: FairQueue[Request]) -> None:
    requests = [Request(claim, "ab"[claim % 2], ("high", "low")[claim % 3 % 2]) for claim in range(20)]
    for request in requests:
        queue.push(request)

    popped = [queue.pop(inf, never) for _ in requests]

    assert {request for request, late in filter(None, popped) if not late} == set(requests)
    assert queue.pop(inf, never) is None


def test_what_costs_more_than_the_room_waits_and_nobody_jumps_over_it(queue: FairQueue[Request]) -> None:
    queue.push(Request(1, cost_tokens=100))
    assert queue.pop(99, never) is None
    queue.push(Request(2, cost_tokens=1))

    assert queue.pop(99, never) is None
    assert queue.pop(100, never) is not None


def test_a_late_one_needs_no_room(queue: FairQueue[Request]) -> None:
    late = Request(1)
    queue.push(late)

    assert queue.pop(0, lambda request: request is late) == (late, True)
    assert len(queue) == 0


def test_only_the_one_that_goes_next_is_asked_whether_it_is_late(queue: FairQueue[Request]) -> None:
    asked: list[int] = []
    for claim in range(10):
        queue.push(Request(claim, "abcde"[claim % 5]))

    def is_late(request: Request) -> bool:
        asked.append(request.claim)
        return False

    queue.pop(inf, is_late)

    assert len(asked) == 1


def test_late_ones_are_taken_whoever_is_next(queue: FairQueue[Request]) -> None:
    for claim in range(30):
        queue.push(Request(claim, "abc"[claim % 3], deadline_at_ms=claim))

    gone = queue.take_late(lambda request: request.deadline_at_ms < 12)

    assert sorted(request.claim for request in gone) == list(range(12))
    assert len(queue) == queue.total.requests == 18
    assert queue.take_late(never) == []


def test_a_removed_one_does_not_leave_again(queue: FairQueue[Request]) -> None:
    first, second = Request(1), Request(2)
    queue.push(first)
    queue.push(second)

    assert queue.remove(first, charge=False)
    assert not queue.remove(first, charge=True)
    assert queue.pop(inf, never) == (second, False)
    assert not queue.remove(second, charge=False)
    queue.push(first)
    assert queue.pop(inf, never) == (first, False)


def test_a_claim_waits_once(queue: FairQueue[Request]) -> None:
    queue.push(Request(1, "a", cost_tokens=5))

    with pytest.raises(ValueError, match="waits already"):
        queue.push(Request(1, "b", cost_tokens=7))

    assert queue.total == Backlog(1, 5, 1)
    assert queue.busiest(10) == [("a", 5)]


@pytest.mark.parametrize("policy", ["drr", "vtc"])
def test_an_expedited_one_goes_first_in_its_line_and_takes_no_other_turn(policy: Policy) -> None:
    def pushed(*expedited: int) -> list[int]:
        queue: FairQueue[Request] = make_fair_queue(policy)
        requests = [Request(claim, "abc"[claim % 3], deadline_at_ms=1_000 + claim) for claim in range(12)]
        for request in requests:
            queue.push(request)
        for claim in expedited:
            assert queue.expedite(requests[claim])
        queue.push(Request(12, "a", deadline_at_ms=0))
        return [popped[0].claim for _ in range(13) if (popped := queue.pop(inf, never)) is not None]

    plain, expedited = pushed(), pushed(9, 6, 9)
    assert [claim for claim in expedited if claim % 3 == 0] == [9, 6, 12, 0, 3]
    assert [claim % 3 for claim in expedited] == [claim % 3 for claim in plain]


def test_the_one_line_of_fifo_is_left_as_it_is() -> None:
    queue: FairQueue[Request] = make_fair_queue("fifo")
    first, second = Request(1, "a"), Request(2, "b")
    queue.push(first)
    queue.push(second)
    assert not queue.expedite(second)
    assert queue.pop(inf, never) == (first, False)


def test_what_does_not_wait_is_not_expedited(queue: FairQueue[Request]) -> None:
    gone = Request(1)
    queue.push(gone)
    queue.pop(inf, never)
    assert not queue.expedite(gone)
    assert len(queue) == 0


@pytest.mark.parametrize("policy", ["drr", "vtc"])
def test_late_ones_are_taken_from_behind_an_expedited_one(policy: Policy) -> None:
    queue: FairQueue[Request] = make_fair_queue(policy)
    requests = [Request(claim, deadline_at_ms=claim) for claim in range(6)]
    for request in requests:
        queue.push(request)
    queue.expedite(requests[5])
    queue.expedite(requests[4])
    assert queue.take_late(lambda request: request.deadline_at_ms < 3) == requests[:3]
    assert [queue.pop(inf, never) for _ in range(3)] == [(requests[claim], False) for claim in (5, 4, 3)]


def test_whoever_is_expedited_stays_first_when_groups_change() -> None:
    queue: FairQueue[Request] = make_fair_queue("drr")
    requests = [Request(claim, group="search", deadline_at_ms=claim) for claim in range(4)]
    for request in requests:
        queue.push(request)
    queue.expedite(requests[3])
    queue.set_share("a", Share(1.0, (TenantGroup("search"),)))
    assert queue.pop(inf, never) == (requests[3], False)


def test_an_unknown_class_is_refused(queue: FairQueue[Request]) -> None:
    with pytest.raises(ValueError, match="urgent"):
        queue.push(Request(1, priority_class="urgent"))
    with pytest.raises(ValueError, match="urgent"):
        queue.set_class_weights({"urgent": 1.0})

    queue.charge("a", "", "urgent", 5)
    assert len(queue) == 0
    assert queue.waiting("a", "urgent") == queue.waiting_in_class("urgent") == Backlog()


@pytest.mark.parametrize("weight", [-1.0, inf, nan])
def test_a_weight_that_is_none_is_refused(queue: FairQueue[Request], weight: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        queue.set_class_weights({"low": weight})
    with pytest.raises(ValueError, match="positive"):
        Share(weight)
    with pytest.raises(ValueError, match="positive"):
        Share(1.0, (TenantGroup("search", weight),))


@pytest.mark.parametrize(
    "groups",
    [
        (TenantGroup("a"), TenantGroup("a")),
        (TenantGroup(""),),
        (TenantGroup("a", 1.0, "b"),),
        (TenantGroup("a", 1.0, "a"),),
        (TenantGroup("a", 1.0, "b"), TenantGroup("b", 1.0, "c"), TenantGroup("c", 1.0, "a")),
    ],
)
def test_groups_that_are_no_tree_are_refused(groups: tuple[TenantGroup, ...]) -> None:
    with pytest.raises(ValueError, match="group"):
        Share(1.0, groups)


def test_a_class_of_weight_zero_keeps_what_it_had(queue: FairQueue[Request]) -> None:
    queue.set_class_weights({"low": 0.0})
    queue.push(Request(1, priority_class="low"))

    assert queue.pop(inf, never) is not None


def test_weights_count_while_something_waits(queue: FairQueue[Request]) -> None:
    queue.set_share("a", Share(2.5))
    queue.push(Request(1, "a"))
    queue.push(Request(2, "a"))
    queue.push(Request(3, "b"))
    assert queue.backlogged_weight("normal") == 3.5

    queue.set_share("a", Share(4.0))
    assert queue.backlogged_weight("normal") == 5.0
    for _ in range(3):
        queue.pop(inf, never)
    assert queue.backlogged_weight("normal") == 0.0


def test_a_tenant_is_forgotten_when_nothing_of_it_waits(queue: FairQueue[Request]) -> None:
    queue.set_share("a", Share(2.5))
    queue.push(Request(1, "a", "high"))
    queue.push(Request(2, "a", "low"))

    queue.set_share("a", None)
    assert queue.backlogged_weight("high") == queue.backlogged_weight("low") == 2.5
    queue.pop(inf, never)
    assert queue.backlogged_weight("high") + queue.backlogged_weight("low") == 2.5
    queue.pop(inf, never)
    queue.push(Request(3, "a", "high"))
    assert queue.backlogged_weight("high") == 1.0


def test_a_tenant_that_returns_before_it_is_forgotten_is_kept(queue: FairQueue[Request]) -> None:
    queue.set_share("a", Share(2.5))
    queue.push(Request(1, "a"))
    queue.set_share("a", None)
    queue.set_share("a", Share(2.5))
    queue.pop(inf, never)
    queue.push(Request(2, "a"))

    assert queue.backlogged_weight("normal") == 2.5


def test_an_unknown_policy_and_an_impossible_quantum_are_refused() -> None:
    with pytest.raises(ValueError, match="lottery"):
        make_fair_queue("lottery")  # type: ignore[arg-type] # what a setting might say
    with pytest.raises(ValueError, match="quantum"):
        make_fair_queue("drr", 0.0)


def test_fifo_is_by_arrival_whatever_else() -> None:
    queue: FairQueue[Request] = make_fair_queue("fifo")
    requests = [
        Request(1, "a", "low", deadline_at_ms=9),
        Request(2, "b", "high", deadline_at_ms=1),
        Request(3, "a", "normal", deadline_at_ms=5),
    ]
    for request in requests:
        queue.push(request)

    assert [queue.pop(inf, never) for _ in requests] == [(request, False) for request in requests]


class Accounts(RuleBasedStateMachine):
    """Any sequence of calls against a plain set: what waits, and nothing else, can leave; the sums are recomputed."""

    @initialize(policy=st.sampled_from(POLICIES))
    def begin(self, policy: Policy) -> None:
        self.queue: FairQueue[Request] = make_fair_queue(policy, 16.0)
        self.waiting: dict[int, Request] = {}
        self.weights: dict[str, float] = {}
        self.leaving: set[str] = set()
        self.claims = 0

    @rule(
        count=st.integers(1, 40),
        tenant=st.sampled_from("abc"),
        group=st.sampled_from(("", "search", "chat", "unknown")),
        priority_class=st.sampled_from(("high", "normal", "low")),
        cost=st.integers(0, 50),
        deadline=st.integers(0, 20),
    )
    def push(self, count: int, tenant: str, group: str, priority_class: str, cost: int, deadline: int) -> None:
        for _ in range(count):
            self.claims += 1
            request = Request(self.claims, tenant, priority_class, cost, deadline, group, cost // 2, cost * 3)
            self.queue.push(request)
            self.waiting[self.claims] = request

    @rule(count=st.integers(1, 30), room=st.sampled_from((0, 10, 50)), now_ms=st.integers(0, 20))
    def pop(self, count: int, room: int, now_ms: int) -> None:
        for _ in range(count):
            popped = self.queue.pop(room, lambda request: request.deadline_at_ms < now_ms)
            if popped is None:
                assert room < 50 or not self.waiting
                return
            request, late = popped
            assert late is (request.deadline_at_ms < now_ms)
            assert late or request.cost_tokens <= room
            self.leave(request)

    @precondition(lambda self: self.waiting)
    @rule(numbers=st.lists(st.integers(0, 1_000), min_size=1, max_size=40), charge=st.booleans())
    def remove(self, numbers: list[int], charge: bool) -> None:
        for number in numbers:
            request = list(self.waiting.values())[number % len(self.waiting)]
            assert self.queue.remove(request, charge=charge)
            assert not self.queue.remove(request, charge=charge)
            self.leave(request)
            if not self.waiting:
                return

    @precondition(lambda self: self.waiting)
    @rule(numbers=st.lists(st.integers(0, 1_000), min_size=1, max_size=40))
    def expedite(self, numbers: list[int]) -> None:
        for number in numbers:
            request = list(self.waiting.values())[number % len(self.waiting)]
            assert self.queue.expedite(request) is isinstance(self.queue, ShareTree)

    @rule(now_ms=st.integers(0, 20))
    def take_late(self, now_ms: int) -> None:
        gone = self.queue.take_late(lambda request: request.deadline_at_ms < now_ms)
        assert all(request.deadline_at_ms < now_ms for request in gone)
        for request in gone:
            self.leave(request)
        assert all(request.deadline_at_ms >= now_ms for request in self.waiting.values())

    @rule(tenant=st.sampled_from("abc"), share=st.sampled_from(SHARES))
    def share(self, tenant: str, share: Share | None) -> None:
        self.queue.set_share(tenant, share)
        self.leaving.discard(tenant)
        if share is not None:
            self.weights[tenant] = share.weight
        elif any(request.tenant == tenant for request in self.waiting.values()):
            self.leaving.add(tenant)
        else:
            self.weights.pop(tenant, None)

    @rule(tenant=st.sampled_from("abcd"), group=st.sampled_from(("", "search")), tokens=st.integers(-60, 60))
    def charge(self, tenant: str, group: str, tokens: int) -> None:
        self.queue.charge(tenant, group, "normal", tokens)

    @invariant()
    def sums_are_right(self) -> None:
        if not hasattr(self, "queue"):
            return
        assert len(self.queue) == len(self.waiting)
        assert self.queue.total == _backlog(list(self.waiting.values()))
        for name in ("high", "normal", "low"):
            there = [request for request in self.waiting.values() if request.priority_class == name]
            tenants = {request.tenant for request in there}
            assert self.queue.waiting_in_class(name) == _backlog(there)
            expected = sum(self.weights.get(tenant, 1.0) for tenant in tenants)
            assert self.queue.backlogged_weight(name) == pytest.approx(expected)
            for tenant in "abcd":
                own = [request for request in there if request.tenant == tenant]
                assert self.queue.waiting(tenant, name) == _backlog(own)

    @invariant()
    def rings_hold_what_waits_and_count_the_rest(self) -> None:
        queue = getattr(self, "queue", None)
        if isinstance(queue, ShareTree):
            _check_rings(queue._root)

    def leave(self, request: Request) -> None:
        assert self.waiting.pop(request.claim) is request
        tenant = request.tenant
        if tenant in self.leaving and all(other.tenant != tenant for other in self.waiting.values()):
            self.leaving.discard(tenant)
            self.weights.pop(tenant, None)

    def teardown(self) -> None:
        if hasattr(self, "queue"):
            while (popped := self.queue.pop(inf, never)) is not None:
                self.leave(popped[0])
            assert not self.waiting


def _backlog(requests: list[Request]) -> Backlog:
    return Backlog(
        len(requests),
        sum(request.cost_tokens for request in requests),
        sum(request.size_bytes for request in requests),
    )


def _check_rings(node: Node[Request]) -> None:
    turns = [child.turn for _, turn, child in node.ring if turn == child.turn]
    assert len(node.ring) - len(turns) == node.shadows
    assert sorted(turns) == sorted(child.turn for child in node.children.values() if child.turn)
    assert not node.ring or node.ring[0][1] == node.ring[0][2].turn
    assert not (node.ring and node.heap.entries)
    for child in node.children.values():
        assert bool(child.turn) is bool(child.ring or child.heap.entries)
        _check_rings(child)


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(stateful_step_count=25)
