"""The promises of the fair queue under any arrivals, costs, weights, groups, corrections and deadlines."""

from functools import partial
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import TenantGroup
from stream_processors.dispatcher.scheduling.backlog_statistics import Share
from stream_processors.dispatcher.scheduling.fair_queue import FairQueue, Policy, make_fair_queue, service_gap_bound
from tests.kit.fair_queue_watch import Request, Watch, never

MAX_COST = 40
GROUPS = ("", "search", "chat", "chat-long")
WEIGHTS = (0.05, 0.5, 1.0, 2.0, 7.0)
SHARES = st.builds(
    Share,
    st.sampled_from(WEIGHTS),
    st.sampled_from(WEIGHTS).flatmap(
        lambda weight: st.sampled_from(
            (
                (),
                (TenantGroup("search", weight),),
                (TenantGroup("chat", 2.0), TenantGroup("search", weight), TenantGroup("chat-long", weight, "chat")),
            )
        )
    ),
)
COSTS = st.sampled_from((1, 2, 5, 13, MAX_COST))
TENANTS = st.sampled_from("abc")
CLASSES = st.sampled_from(("high", "normal", "low"))

PUSH = st.tuples(
    st.just("push"), st.integers(1, 12), TENANTS, st.sampled_from(GROUPS), CLASSES, COSTS, COSTS, st.integers(0, 40)
)
POP = st.tuples(st.just("pop"), st.integers(1, 12))
STEPS = st.lists(
    st.one_of(
        PUSH,
        PUSH,
        POP,
        POP,
        st.tuples(st.just("settle"), st.integers(1, 5), st.integers(0, 50)),
        st.tuples(st.just("share"), TENANTS, SHARES),
        st.tuples(st.just("class"), CLASSES, st.sampled_from(WEIGHTS)),
        st.tuples(st.just("drop"), st.integers(0, 100)),
        st.tuples(st.just("expedite"), st.integers(0, 100)),
        st.tuples(st.just("time"), st.integers(1, 10)),
        st.tuples(st.just("pop within"), st.integers(0, MAX_COST)),
    ),
    min_size=5,
    max_size=60,
)


def take(watch: Watch, step: tuple[Any, ...]) -> None:
    match step:
        case ("push", count, tenant, group, priority_class, cost, actual, deadline_in_ms):
            for _ in range(count):
                watch.push(tenant, group, priority_class, cost, actual, deadline_in_ms)
        case ("pop", count):
            for _ in range(count):
                watch.pop()
        case ("settle", count, number):
            for _ in range(min(count, len(watch.in_flight))):
                watch.settle(number)
        case ("share", tenant, share):
            watch.set_share(tenant, share)
        case ("class", priority_class, weight):
            watch.set_class_weight(priority_class, weight)
        case ("drop", number) if watch.waiting:
            watch.drop(list(watch.waiting.values())[number % len(watch.waiting)])
        case ("expedite", number) if watch.waiting:
            watch.expedite(list(watch.waiting.values())[number % len(watch.waiting)])
        case ("time", passed_ms):
            watch.now_ms += passed_ms
        case ("pop within", room_tokens):
            watch.pop(room_tokens)


def drain(watch: Watch) -> None:
    while watch.waiting:
        assert watch.pop() is not None
    assert watch.pop() is None
    assert len(watch.left) == watch.pushed


@pytest.mark.parametrize(("policy", "quantum_tokens"), [("drr", 3.0), ("drr", 64.0), ("vtc", 1.0)])
@given(steps=STEPS)
def test_service_stays_within_the_bound_whatever_happens(
    policy: Policy, quantum_tokens: float, steps: list[tuple[Any, ...]]
) -> None:
    watch = Watch(policy, quantum_tokens, MAX_COST)
    for step in steps:
        take(watch, step)
    drain(watch)


@pytest.mark.parametrize(("policy", "quantum_tokens"), [("drr", 3.0), ("drr", 64.0), ("vtc", 1.0)])
@pytest.mark.parametrize("seed", range(2))
def test_service_stays_within_the_bound_for_long(policy: Policy, quantum_tokens: float, seed: int) -> None:
    """A queue that is never empty, over many rounds; the bound is nearly reached, so it says something."""
    random = Random(seed)
    watch = Watch(policy, quantum_tokens, MAX_COST)
    groups = (TenantGroup("chat", 3.0), TenantGroup("chat-long", 0.5, "chat"))
    for tenant, share in {"a": Share(4.0), "b": Share(0.25), "c": Share(1.0, groups)}.items():
        watch.set_share(tenant, share)
    for _ in range(600):
        if len(watch.waiting) < random.choice((10, 30)):
            cost = random.choice((1, 7, MAX_COST))
            watch.push(random.choice("abc"), random.choice(GROUPS), random.choice(("high", "low")), cost, cost, 10)
        else:
            watch.pop()
    assert watch.spread > 0.4


@pytest.mark.parametrize("cost", [5, 20, MAX_COST])
@pytest.mark.parametrize("flipped", [0.5, 4.0, 7.0])
def test_a_weight_that_goes_up_and_down_gets_no_more_than_the_larger_one(cost: int, flipped: float) -> None:
    """As the weights of classes do in a fleet, with every backlog elsewhere that begins or ends."""
    watch = Watch("drr", 64.0, MAX_COST)
    for name in ("high", "low"):
        for _ in range(8):
            watch.push("a", "", name, cost, cost, 10)
    served = dict.fromkeys(("high", "low"), 0)
    for turn in range(400):
        watch.set_class_weight("high", 8.0 if turn % 2 else flipped)
        request = watch.pop()
        assert request is not None
        served[request.priority_class] += cost
        watch.push("a", "", request.priority_class, cost, cost, 10)
    assert served["low"] / sum(served.values()) > 0.95 / 9


def test_tenants_weights_that_go_up_and_down_starve_nobody() -> None:
    watch = Watch("drr", 64.0, MAX_COST)
    for name in ("a", "b"):
        for _ in range(8):
            watch.push(name, "", "normal", 13, 13, 10)
    served = dict.fromkeys(("a", "b"), 0)
    for turn in range(400):
        watch.set_share("a", Share(2.0 if turn % 2 else 1.0))
        request = watch.pop()
        assert request is not None
        served[request.tenant] += 13
        watch.push(request.tenant, "", "normal", 13, 13, 10)
    assert 0.95 / 3 < served["b"] / sum(served.values()) < 1.05 / 2


def _is_not_of(tenants: set[str], item: Request) -> bool:
    return item.tenant not in tenants


@given(
    costs=st.lists(COSTS, min_size=1, max_size=30),
    rounds=st.lists(st.tuples(st.sets(TENANTS), st.integers(0, 6)), max_size=20),
    policy=st.sampled_from(("drr", "vtc")),
)
def test_a_queue_without_a_place_rests_and_holds_up_no_other(
    costs: list[int], rounds: list[tuple[set[str], int]], policy: Policy
) -> None:
    queue: FairQueue[Request] = make_fair_queue(policy, quantum_tokens=8.0)
    waiting: dict[str, list[Request]] = {tenant: [] for tenant in "abc"}
    for number, cost in enumerate(costs):
        for tenant, of_tenant in waiting.items():
            request = Request(3 * number + "abc".index(tenant), tenant, cost_tokens=cost)
            of_tenant.append(request)
            queue.push(request)
    for blocked, turns in rounds:
        for _ in range(turns):
            popped = queue.pop(inf, never, partial(_is_not_of, blocked))
            able = [tenant for tenant, left in waiting.items() if left and tenant not in blocked]
            assert (popped is not None) == bool(able)
            if popped is None:
                break
            request = popped[0]
            assert request.tenant in able
            assert request is waiting[request.tenant].pop(0)
        queue.unblock()
        assert len(queue) == sum(map(len, waiting.values()))
    while (popped := queue.pop(inf, never, lambda _item: True)) is not None:
        waiting[popped[0].tenant].remove(popped[0])
    assert not any(waiting.values())
    assert len(queue) == 0


@given(costs=st.lists(COSTS, min_size=10, max_size=40), blocked=st.lists(st.booleans(), min_size=10, max_size=40))
def test_what_one_tenant_has_no_place_for_changes_nothing_between_the_others(
    costs: list[int], blocked: list[bool]
) -> None:
    queue: FairQueue[Request] = make_fair_queue("drr", quantum_tokens=8.0)
    for number, cost in enumerate(costs * 4):
        for tenant in "abc":
            queue.push(Request(3 * number + "abc".index(tenant), tenant, cost_tokens=cost))
    served = dict.fromkeys("abc", 0)
    bound = service_gap_bound(8.0, MAX_COST, 1.0, 1.0)
    for is_blocked in blocked:
        popped = queue.pop(inf, never, partial(_is_not_of, {"c"} if is_blocked else set()))
        queue.unblock()
        assert popped is not None
        served[popped[0].tenant] += popped[0].cost_tokens
        assert abs(served["a"] - served["b"]) < bound
        assert served["c"] - max(served["a"], served["b"]) < bound, "it catches up on nothing"
