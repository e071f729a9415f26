"""Shares by tokens: classes, tenants and groups, debts and credits, what a turn costs, and what is remembered."""

from collections import Counter
from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

import pytest

from fairlane.records import TenantGroup
from stream_processors.dispatcher.scheduling import share_tree
from stream_processors.dispatcher.scheduling.backlog_statistics import Share
from stream_processors.dispatcher.scheduling.fair_queue import FairQueue, Policy, bounded_wait_tokens, make_fair_queue
from stream_processors.dispatcher.scheduling.share_tree import RESTING_TENANTS, DeadlineHeap, ShareTree
from tests.kit.fair_queue_watch import Request, never

FAIR: tuple[Policy, ...] = ("drr", "vtc")


class Line:
    """A queue in which chosen shares always have something waiting."""

    def __init__(self, policy: Policy, quantum_tokens: float = 50.0) -> None:
        self.queue: FairQueue[Request] = make_fair_queue(policy, quantum_tokens)
        self._claims = 0

    def push(self, tenant: str = "a", **fields: Any) -> Request:
        self._claims += 1
        cost = fields.setdefault("cost_tokens", 100)
        request = Request(self._claims, tenant, **{"prompt_tokens": cost} | fields)
        self.queue.push(request)
        return request

    def pop(self) -> Request:
        popped = self.queue.pop(inf, never)
        assert popped is not None
        return popped[0]

    def served(self, turns: int, key: Callable[[Request], str], **replacement: Any) -> Counter[str]:
        """Tokens by ``key`` over some turns, each request that leaves being replaced by one like it."""
        tokens: Counter[str] = Counter()
        for _ in range(turns):
            request = self.pop()
            tokens[key(request)] += request.cost_tokens
            self.push(
                request.tenant,
                **{"cost_tokens": request.cost_tokens, "group": request.group}
                | {"priority_class": request.priority_class, "deadline_at_ms": request.deadline_at_ms + 1}
                | replacement,
            )
        return tokens


def parts(tokens: Counter[str]) -> dict[str, float]:
    return {name: count / tokens.total() for name, count in tokens.items()}


@pytest.mark.parametrize("policy", FAIR)
def test_classes_share_by_tokens(policy: Policy) -> None:
    line = Line(policy)
    for name, cost in (("high", 7), ("normal", 100), ("low", 31)):
        for _ in range(3):
            line.push(priority_class=name, cost_tokens=cost)

    served = parts(line.served(30_000, lambda request: request.priority_class))

    assert served == pytest.approx({"high": 8 / 12, "normal": 3 / 12, "low": 1 / 12}, rel=0.01)


@pytest.mark.parametrize("policy", FAIR)
def test_tenants_share_by_tokens_whatever_the_size_of_their_requests(policy: Policy) -> None:
    line = Line(policy)
    for tenant, weight, cost in (("a", 1.0, 100), ("b", 2.0, 3), ("c", 4.0, 40)):
        line.queue.set_share(tenant, Share(weight))
        for _ in range(5):
            line.push(tenant, cost_tokens=cost)

    served = parts(line.served(20_000, lambda request: request.tenant))

    assert served == pytest.approx({"a": 1 / 7, "b": 2 / 7, "c": 4 / 7}, rel=0.01)


@pytest.mark.parametrize("policy", FAIR)
def test_the_backlog_of_a_tenant_gets_it_nothing(policy: Policy) -> None:
    line = Line(policy)
    for _ in range(2_000):
        line.push("flooder")
    for _ in range(3):
        line.push("victim")

    order = [line.pop().tenant for _ in range(7)]

    assert order.count("victim") == 3


@pytest.mark.parametrize("policy", FAIR)
def test_groups_divide_what_their_tenant_gets(policy: Policy) -> None:
    line = Line(policy)
    groups = (TenantGroup("search", 3.0), TenantGroup("chat", 1.0), TenantGroup("chat-long", 4.0, "chat"))
    line.queue.set_share("a", Share(1.0, groups))
    for group, cost in (("", 10), ("search", 30), ("chat", 50), ("chat-long", 5)):
        for _ in range(5):
            line.push("a", group=group, cost_tokens=cost)
            line.push("b", cost_tokens=20)

    served = parts(line.served(60_000, lambda request: f"{request.tenant}/{request.group}"))

    expected = {"b/": 0.5, "a/": 0.1, "a/search": 0.3, "a/chat": 0.1 / 5, "a/chat-long": 0.1 * 4 / 5}
    assert served == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize("policy", FAIR)
def test_one_busy_group_has_all_of_its_tenants_share(policy: Policy) -> None:
    line = Line(policy)
    line.queue.set_share("a", Share(1.0, (TenantGroup("search", 0.1), TenantGroup("chat", 9.0))))
    for _ in range(3):
        line.push("a", group="search")
        line.push("b")

    served = parts(line.served(2_000, lambda request: request.tenant))

    assert served == pytest.approx({"a": 0.5, "b": 0.5}, rel=0.01)


@pytest.mark.parametrize("policy", FAIR)
def test_a_group_that_is_not_named_shares_with_those_of_no_group(policy: Policy) -> None:
    line = Line(policy)
    line.queue.set_share("a", Share(1.0, (TenantGroup("search", 2.0),)))
    for group in ("", "other", "search"):
        for _ in range(3):
            line.push("a", group=group)

    served = parts(line.served(6_000, lambda request: request.group))

    assert served["search"] == pytest.approx(2 / 3, rel=0.01)


@pytest.mark.parametrize("policy", FAIR)
def test_weights_change_while_requests_wait(policy: Policy) -> None:
    line = Line(policy)
    for _ in range(4):
        line.push("a")
        line.push("b")
    line.served(100, lambda request: request.tenant)

    line.queue.set_share("a", Share(3.0))
    served = parts(line.served(4_000, lambda request: request.tenant))
    assert served == pytest.approx({"a": 0.75, "b": 0.25}, rel=0.02)

    line.queue.set_share("a", Share(1.0, (TenantGroup("search"),)))
    served = parts(line.served(4_000, lambda request: request.tenant))
    assert served == pytest.approx({"a": 0.5, "b": 0.5}, rel=0.02)

    for _ in range(3):
        line.push("a", group="search")
    line.queue.set_share("a", Share(1.0, (TenantGroup("search", 4.0),)))
    served = parts(line.served(4_000, lambda request: f"{request.tenant}/{request.group}"))
    assert served == pytest.approx({"a/": 0.1, "a/search": 0.4, "b/": 0.5}, rel=0.03)

    line.queue.set_class_weights({"low": 8.0})
    line.push("a", priority_class="low")
    line.push("a", priority_class="high")
    served = parts(line.served(9_000, lambda request: request.priority_class))
    assert served == pytest.approx({"high": 8 / 19, "low": 8 / 19, "normal": 3 / 19}, rel=0.02)


def test_a_weight_that_was_far_too_small_is_forgiven_when_it_grows() -> None:
    line = Line("drr")
    line.queue.set_share("a", Share(1e-6))
    for _ in range(10):
        line.push("a")
        line.push("b")
    assert {line.pop().tenant, line.pop().tenant} == {"a", "b"}

    line.queue.set_share("a", Share(1.0))

    assert "a" in {line.pop().tenant for _ in range(4)}


@pytest.mark.parametrize("policy", FAIR)
def test_the_earliest_deadline_goes_first_and_ties_by_arrival(policy: Policy) -> None:
    line = Line(policy)
    deadlines = [Random(1).randint(0, 10) for _ in range(100)]
    pushed = [line.push(deadline_at_ms=deadline) for deadline in deadlines]

    assert [line.pop() for _ in pushed] == sorted(pushed, key=lambda request: (request.deadline_at_ms, request.claim))


@pytest.mark.parametrize("policy", FAIR)
def test_idle_time_earns_no_credit(policy: Policy) -> None:
    line = Line(policy)
    for _ in range(3):
        line.push("a")
    line.served(1_000, lambda request: request.tenant)

    for _ in range(10):
        line.push("b")

    assert line.served(20, lambda request: request.tenant)["b"] in {900, 1_000, 1_100}


@pytest.mark.parametrize("policy", FAIR)
def test_a_debt_remains_while_its_tenant_is_idle(policy: Policy) -> None:
    line = Line(policy)
    for _ in range(100):
        line.push("b")
    line.push("a", cost_tokens=1_000)
    while line.pop().tenant != "a":
        pass

    for _ in range(3):
        line.push("a")
    order = [line.pop().tenant for _ in range(14)]

    assert order[:9] == ["b"] * 9
    assert "a" in order


@pytest.mark.parametrize("policy", FAIR)
@pytest.mark.parametrize("last", ["served", "removed"])
def test_those_that_come_one_after_another_owe_each_other_nothing(policy: Policy, last: str) -> None:
    line = Line(policy)
    line.push("a", cost_tokens=5_000)
    if last == "removed":
        removed = line.push("a", deadline_at_ms=2_000)
        line.pop()
        line.queue.remove(removed, charge=False)
    else:
        line.pop()
    for _ in range(20):
        line.push("b")
        line.push("a")

    assert [line.pop().tenant for _ in range(10)].count("a") in {4, 5, 6}


@pytest.mark.parametrize("policy", FAIR)
def test_a_refund_to_one_is_no_credit_to_those_that_come_next(policy: Policy) -> None:
    line = Line(policy)
    for _ in range(100):
        line.push("a")
        line.push("b")
    for _ in range(100):
        line.pop()
    line.queue.charge("a", "", "normal", -500)
    for _ in range(100):
        line.push("c")

    order = [line.pop().tenant for _ in range(35)]

    assert order.count("a") in {14, 15, 16}
    assert order.count("b") in {9, 10, 11}


@pytest.mark.parametrize("policy", FAIR)
def test_a_refund_of_a_forgotten_tenant_reaches_its_class(policy: Policy) -> None:
    line = Line(policy)
    for _ in range(200):
        line.push("a", priority_class="high")
        line.push("a", priority_class="low")
    for _ in range(50):
        line.pop()
    line.queue.charge("stranger", "", "low", -1_000)

    assert [line.pop().priority_class for _ in range(10)].count("low") >= 9


@pytest.mark.parametrize("policy", FAIR)
def test_a_debtor_is_not_forgotten(policy: Policy) -> None:
    line = Line(policy)
    for _ in range(4 * RESTING_TENANTS):
        line.push("busy")
    line.push("debtor", cost_tokens=1_000_000)
    while line.pop().tenant != "debtor":
        pass
    for number in range(2 * RESTING_TENANTS):
        line.push(f"guest-{number}", deadline_at_ms=number)
    for _ in range(2 * RESTING_TENANTS + 100):
        line.pop()
    line.push("debtor")

    assert "debtor" not in {line.pop().tenant for _ in range(100)}


@pytest.mark.parametrize("policy", FAIR)
def test_late_ones_are_never_charged(policy: Policy) -> None:
    line = Line(policy)
    for _ in range(50):
        line.push("a", deadline_at_ms=1, cost_tokens=10_000)
    for _ in range(20):
        line.push("a", deadline_at_ms=2)
        line.push("b", deadline_at_ms=2)
    gone = 0
    order: list[str] = []
    while len(order) < 10:
        popped = line.queue.pop(inf, lambda request: request.deadline_at_ms < 2)
        assert popped is not None
        request, late = popped
        gone += late
        if not late:
            order.append(request.tenant)

    assert gone == 50
    assert order.count("a") == order.count("b") == 5


@pytest.mark.parametrize("policy", FAIR)
@pytest.mark.parametrize("charge", [True, False])
def test_what_is_dispatched_out_of_turn_is_charged_and_what_is_dropped_is_not(policy: Policy, charge: bool) -> None:
    line = Line(policy)
    out_of_turn = [line.push("a") for _ in range(6)]
    for _ in range(20):
        line.push("a")
        line.push("b")
    for request in out_of_turn:
        line.queue.remove(request, charge=charge)

    order = [line.pop().tenant for _ in range(20)]

    assert order.count("b") == pytest.approx(13 if charge else 10, abs=1)


@pytest.mark.parametrize("policy", FAIR)
def test_corrections_make_shares_those_of_the_actual_cost(policy: Policy) -> None:
    """One tenant costs three times its estimate, the other half of it; some of each are in flight."""
    line = Line(policy, 10.0)
    line.queue.set_share("a", Share(4.0))
    actual = {"a": 300, "b": 50}
    for _ in range(10):
        line.push("a", prompt_tokens=40)
        line.push("b", prompt_tokens=40)
    tokens: Counter[str] = Counter()
    in_flight: list[Request] = []
    for _ in range(7_000):
        request = line.pop()
        line.push(request.tenant, prompt_tokens=40)
        in_flight.append(request)
        if len(in_flight) > 4:
            done = in_flight.pop(0)
            tokens[done.tenant] += actual[done.tenant]
            charged = 40 if policy == "vtc" else 100
            line.queue.charge(done.tenant, "", "normal", actual[done.tenant] - charged)

    assert parts(tokens) == pytest.approx({"a": 0.8, "b": 0.2}, rel=0.02)


@pytest.mark.parametrize("policy", FAIR)
def test_a_refund_to_an_idle_tenant_is_no_credit(policy: Policy) -> None:
    line = Line(policy)
    line.push("a")
    line.pop()
    for _ in range(100):
        line.push("b")
    for _ in range(50):
        line.pop()

    line.queue.charge("a", "", "normal", -1_000_000)
    line.queue.charge("stranger", "", "normal", -1_000_000)
    for _ in range(10):
        line.push("a")
        line.push("stranger")

    assert [line.pop().tenant for _ in range(15)].count("b") in {4, 5, 6}


@pytest.mark.parametrize("policy", FAIR)
def test_what_an_idle_tenant_cost_more_is_a_debt(policy: Policy) -> None:
    line = Line(policy)
    for _ in range(100):
        line.push("b")
    line.pop()
    line.queue.charge("a", "", "normal", 1_000)
    line.push("a")

    order = [line.pop().tenant for _ in range(12)]

    assert order[:8] == ["b"] * 8
    assert "a" in order


def test_low_waits_no_longer_than_its_bound() -> None:
    """Everything against it: low has just overdrawn, and the others begin to flood at once."""
    quantum_tokens, max_cost = 64.0, 900
    line = Line("drr", quantum_tokens)
    line.push(priority_class="low", cost_tokens=max_cost)
    line.push(priority_class="low", cost_tokens=max_cost)
    line.push(priority_class="high", cost_tokens=1)
    while line.pop().priority_class != "low":
        pass
    for number in range(3_000):
        line.push(f"t{number % 7}", priority_class=("high", "normal")[number % 2], cost_tokens=max_cost)

    passed = 0
    while (request := line.pop()).priority_class != "low":
        passed += request.cost_tokens

    bound = bounded_wait_tokens("low", quantum_tokens, max_cost, {"high": 8.0, "normal": 3.0, "low": 1.0})
    assert bound == 22 * quantum_tokens + 13 * max_cost
    assert 0.5 * bound < passed <= bound


@pytest.mark.parametrize("policy", FAIR)
def test_a_turn_costs_the_same_whatever_idles_and_whatever_is_owed(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in heap operations: 5,000 idle tenants, and a debt of a billion rounds, are never walked over."""
    line = Line(policy, 1e-3)
    for number in range(5_000):
        line.push(f"idle-{number}")
    for _ in range(5_000):
        line.pop()
    line.queue.set_share("a", Share(1e-6))
    for _ in range(50):
        line.push("a", cost_tokens=1_000)
        line.push("b", cost_tokens=1_000)
    operations: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        operation = getattr(share_tree, name)

        def count(*arguments: Any) -> Any:
            operations[name] += 1
            return operation(*arguments)

        return count

    for name in ("heappush", "heappop", "heapreplace", "heapify"):
        monkeypatch.setattr(share_tree, name, counted(name))
    for _ in range(100):
        line.pop()

    assert operations.total() <= 100 * 3
    assert len(line.queue) == 0


@pytest.mark.parametrize("policy", FAIR)
def test_tenants_that_idle_for_long_are_forgotten(policy: Policy) -> None:
    line = Line(policy)
    for number in range(5 * RESTING_TENANTS):
        line.push(f"passing-{number}", cost_tokens=1 + number % 300)
        line.pop()
    line.push("busy")
    line.push("busy")
    for number in range(5 * RESTING_TENANTS):
        line.push(f"guest-{number}", cost_tokens=1 + number % 300)
        for _ in range(2):
            if line.pop().tenant == "busy":
                line.push("busy")

    assert isinstance(line.queue, ShareTree)
    known = line.queue._root.children["normal"].children
    assert len(known) <= RESTING_TENANTS + 50


@pytest.mark.parametrize("policy", FAIR)
def test_corrections_leave_nothing_behind(policy: Policy) -> None:
    """Shadows in a ring, and marks in a line, stay fewer than what is there."""
    line = Line(policy)
    requests = [line.push("abc"[number % 3], deadline_at_ms=number) for number in range(3_000)]
    for number in range(5_000):
        line.queue.charge("abc"[number % 3], "", "normal", (100, -99)[number % 2])
    for request in requests[200:2_900]:
        line.queue.remove(request, charge=False)

    assert isinstance(line.queue, ShareTree)
    normal = line.queue._root.children["normal"]
    assert len(normal.ring) <= 3 + 20
    for tenant in normal.children.values():
        assert len(tenant.heap.entries) <= 2 * len(tenant.heap) + 20
    assert len([line.pop() for _ in range(300)]) == 300


def test_a_line_keeps_its_order_whatever_is_removed() -> None:
    random = Random(3)
    line: DeadlineHeap[str] = DeadlineHeap()
    entries = [(random.randint(0, 50), arrival, f"r{arrival}") for arrival in range(400)]
    for entry in entries:
        line.push(entry)
    removed = set(random.sample(range(400), 250))
    for arrival in sorted(removed):
        line.remove(arrival)

    left = sorted(entry for entry in entries if entry[1] not in removed)
    assert sorted(line) == left
    assert [line.pop() for _ in range(len(line))] == [name for _, _, name in left]
    assert not line.entries
