"""Which endpoint gets the next item: weights, limits, ejections and probes."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.backoff import Backoff
from fairlane_server.circuit_breaker import BreakerPolicy
from inference_consumers.engines.remote.balancing import Attempt, AttemptEnd, EndpointBalancer
from inference_consumers.engines.remote.endpoints import BalancingPolicy, ModelEndpoint

ROUND_ROBIN, LEAST = BalancingPolicy.WEIGHTED_ROUND_ROBIN, BalancingPolicy.LEAST_OUTSTANDING
EJECTION = BreakerPolicy(failures=3, rest=Backoff(first_s=1.0, longest_s=8.0, jitter=0.0))

weights_of = st.lists(st.integers(1, 9), min_size=1, max_size=6)


def balancer(policy: BalancingPolicy, *weights: int, most: int = 1_000) -> EndpointBalancer:
    endpoints = [ModelEndpoint(f"http://e{at}", weight, most) for at, weight in enumerate(weights)]
    return EndpointBalancer.of(endpoints, policy, EJECTION)


def is_ejected(some: EndpointBalancer) -> bool:
    """Whether the first endpoint is."""
    return some.states[0].is_ejected


def take(some: EndpointBalancer, now_ms: float = 0.0) -> Attempt:
    attempt = some.choose(now_ms)
    assert attempt is not None
    return attempt


def fail(some: EndpointBalancer, index: int, now_ms: float, times: int = 3) -> None:
    """Items fail at this endpoint, and at no other."""
    others = [at for at in range(len(some.states)) if at != index]
    for _ in range(times):
        attempt = some.choose(now_ms, others)
        assert attempt is not None
        some.ended(attempt, AttemptEnd.FAILED, now_ms)


@given(weights=weights_of, periods=st.integers(1, 3))
def test_over_a_period_round_robin_gives_each_its_weight(weights: list[int], periods: int) -> None:
    some = balancer(ROUND_ROBIN, *weights)
    counts = Counter(take(some).index for _ in range(periods * sum(weights)))
    assert [counts[at] for at in range(len(weights))] == [periods * weight for weight in weights]


def test_round_robin_is_smooth() -> None:
    """The example of nginx's commit message: weights 5, 1, 1."""
    some = balancer(ROUND_ROBIN, 5, 1, 1)
    assert [take(some).index for _ in range(7)] == [0, 0, 1, 0, 2, 0, 0]


@given(weights=weights_of, items=st.integers(1, 80))
def test_what_is_outstanding_is_divided_by_weight(weights: list[int], items: int) -> None:
    """Adams' method of apportionment: never more than the part rounded up."""
    some = balancer(LEAST, *weights)
    for _ in range(items):
        take(some)
    for state in some.states:
        assert state.outstanding <= -(-items * state.weight // sum(weights))


@given(weights=weights_of)
def test_items_one_at_a_time_are_divided_by_weight_as_well(weights: list[int]) -> None:
    some = balancer(LEAST, *weights)
    counts: Counter[int] = Counter()
    for _ in range(sum(weights)):
        attempt = take(some)
        counts[attempt.index] += 1
        some.ended(attempt, AttemptEnd.ANSWERED, 0)
    assert [counts[at] for at in range(len(weights))] == weights


def test_a_busy_endpoint_gets_fewer() -> None:
    some = balancer(LEAST, 1, 1)
    slow = take(some)
    assert [take(some).index for _ in range(2)].count(1 - slow.index) >= 1
    assert {state.outstanding for state in some.states} == {1, 2}


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["choose", *AttemptEnd, "ready", "away"]),
        st.integers(0, 5),
        st.integers(0, 1_500),
    ),
    max_size=120,
)


@given(weights=weights_of, policy=st.sampled_from(list(BalancingPolicy)), most=st.integers(1, 4), events=EVENTS)
def test_whatever_happens_limits_hold_and_an_ejected_endpoint_gets_nothing_but_one_probe(
    weights: list[int], policy: BalancingPolicy, most: int, events: list[tuple[str | AttemptEnd, int, int]]
) -> None:
    some = balancer(policy, *weights, most=most)
    open_attempts: list[Attempt] = []
    now_ms = 0.0
    for event, number, pause_ms in events:
        now_ms += pause_ms
        if event == "choose":
            before = [(state.breaker.is_open, state.probe, state.is_reachable) for state in some.states]
            attempt = some.choose(now_ms)
            if attempt is not None:
                was_open, probe, was_reachable = before[attempt.index]
                assert was_reachable
                assert now_ms >= some.states[attempt.index].rests_until_ms
                if was_open:
                    assert probe is None
                    assert some.states[attempt.index].probe is attempt
                open_attempts.append(attempt)
        elif isinstance(event, AttemptEnd):
            if open_attempts:
                some.ended(open_attempts.pop(number % len(open_attempts)), event, now_ms, 0.0, 500)
        else:
            some.checked(number % len(weights), is_ready=event == "ready")
        outstanding = Counter(attempt.index for attempt in open_attempts)
        for at, state in enumerate(some.states):
            assert state.outstanding == outstanding[at] <= most


def test_failures_in_a_row_eject_and_a_probe_brings_back() -> None:
    some = balancer(ROUND_ROBIN, 1, 1)
    fail(some, 0, 0, times=2)
    some.ended(take(some), AttemptEnd.ANSWERED, 0)
    some.ended(take(some), AttemptEnd.ANSWERED, 0)
    fail(some, 0, 0)
    assert is_ejected(some)
    assert {take(some, 999).index for _ in range(5)} == {1}
    probe = take(some, 1_000)
    assert probe.index == 0
    assert {take(some, 1_000).index for _ in range(5)} == {1}, "one probe at a time"
    some.ended(probe, AttemptEnd.ANSWERED, 1_100)
    assert not is_ejected(some)
    assert 0 in {take(some, 1_100).index for _ in range(2)}


def test_a_probe_that_fails_doubles_the_time_up_to_a_bound() -> None:
    some = balancer(ROUND_ROBIN, 1, 1)
    now_ms = 0.0
    fail(some, 0, now_ms)
    for rest_ms in (1_000, 2_000, 4_000, 8_000, 8_000):
        assert take(some, now_ms + rest_ms - 1).index == 1
        now_ms += rest_ms
        probe = take(some, now_ms)
        assert probe.index == 0
        some.ended(probe, AttemptEnd.FAILED, now_ms)


def test_a_probe_that_was_cancelled_leaves_its_place_to_another() -> None:
    some = balancer(ROUND_ROBIN, 1)
    fail(some, 0, 0)
    some.ended(take(some, 1_000), AttemptEnd.ABANDONED, 1_000)
    assert is_ejected(some)
    assert take(some, 1_000).index == 0


def test_a_probe_whose_answer_began_need_not_wait_for_its_end() -> None:
    some = balancer(ROUND_ROBIN, 1)
    fail(some, 0, 0)
    probe = take(some, 1_000)
    assert some.choose(1_000) is None
    some.began(probe)
    assert not is_ejected(some)
    assert take(some, 1_000).index == 0


def test_what_was_sent_before_an_ejection_says_nothing_about_it() -> None:
    some = balancer(ROUND_ROBIN, 1)
    early = [take(some), take(some)]
    fail(some, 0, 0)
    some.ended(early[0], AttemptEnd.ANSWERED, 10)
    some.ended(early[1], AttemptEnd.FAILED, 20)
    assert is_ejected(some)
    assert some.choose(999) is None
    assert take(some, 1_000).index == 0


def test_what_asks_to_be_left_alone_rests_and_is_not_ejected() -> None:
    some = balancer(ROUND_ROBIN, 1)
    some.ended(take(some), AttemptEnd.BUSY, 0, rest_ms=700)
    assert some.choose(699) is None
    assert some.is_healthy()
    assert take(some, 700).index == 0


def test_after_a_rest_one_item_comes_first_and_the_others_when_it_is_answered() -> None:
    some = balancer(ROUND_ROBIN, 1)
    early = [take(some), take(some)]
    some.ended(early[0], AttemptEnd.BUSY, 0, rest_ms=500)
    some.ended(early[1], AttemptEnd.ANSWERED, 100)
    probe = take(some, 500)
    assert some.choose(500) is None, "what was sent before says nothing about now"
    some.ended(probe, AttemptEnd.BUSY, 600, rest_ms=500)
    assert some.choose(1_099) is None
    some.ended(take(some, 1_100), AttemptEnd.ABANDONED, 1_100)
    probe = take(some, 1_100)
    assert some.choose(1_100) is None
    some.began(probe)
    assert len([take(some, 1_200) for _ in range(3)]) == 3


def test_a_busy_endpoint_that_fails_after_its_rest_is_ejected_as_any_other() -> None:
    some = balancer(ROUND_ROBIN, 1)
    some.ended(take(some), AttemptEnd.BUSY, 0, rest_ms=0)
    fail(some, 0, 0)
    assert is_ejected(some)
    some.ended(take(some, 1_000), AttemptEnd.ANSWERED, 1_000)
    assert len([take(some, 1_000) for _ in range(3)]) == 3


def test_checks_eject_and_admit_but_do_not_end_an_ejection() -> None:
    some = balancer(ROUND_ROBIN, 1)
    assert some.is_healthy(), "nothing is known yet"
    some.checked(0, is_ready=False)
    assert not some.is_healthy(), "the first check decides"
    some.checked(0, is_ready=True)
    some.checked(0, is_ready=False)
    assert some.is_healthy(), "a later one says little"
    some.checked(0, is_ready=False)
    assert not some.is_healthy()
    assert some.choose(0) is None
    some.checked(0, is_ready=True)
    fail(some, 0, 0)
    some.checked(0, is_ready=True)
    assert some.choose(500) is None
    some.checked(0, is_ready=False)
    some.checked(0, is_ready=False)
    assert some.choose(1_500) is None, "no probe to what is not ready"
    some.checked(0, is_ready=True)
    assert take(some, 1_500).index == 0


@pytest.mark.parametrize("policy", list(BalancingPolicy))
def test_with_all_ejected_nothing_is_chosen(policy: BalancingPolicy) -> None:
    some = balancer(policy, 1, 2)
    fail(some, 0, 0)
    fail(some, 1, 0)
    assert some.choose(999) is None
    assert not some.is_healthy()


def test_an_endpoint_that_is_left_out_gets_nothing() -> None:
    some = balancer(LEAST, 1, 1)
    attempts = [some.choose(0, {0}) for _ in range(4)]
    assert [None if one is None else one.index for one in attempts] == [1, 1, 1, 1]
    assert some.choose(0, {0, 1}) is None
    assert not some.is_healthy({0, 1})
