"""The promises of the fair queue under any arrivals, costs, weights, groups, corrections and deadlines."""

from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.records import TenantGroup
from stream_processors.dispatcher.scheduling.backlog_statistics import Share
from stream_processors.dispatcher.scheduling.fair_queue import Policy
from tests.kit.fair_queue_watch import Watch

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
