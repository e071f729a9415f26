"""The breaker lets through, stops, and tries again; hypothesis looks for a way to lock it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.backoff import Backoff
from fairlane_server.circuit_breaker import BreakerPolicy, CircuitBreaker

POLICY = BreakerPolicy(failures=3, rest=Backoff(first_s=1.0, longest_s=4.0, jitter=0.5))


def opened() -> CircuitBreaker:
    breaker = CircuitBreaker(POLICY)
    for _ in range(3):
        assert breaker.lets_through(0)
        breaker.failed(0, 0.0)
    return breaker


def test_only_failures_in_a_row_open_it() -> None:
    breaker = CircuitBreaker(POLICY)
    for _ in range(10):
        breaker.failed(0, 0.0)
        breaker.failed(0, 0.0)
        breaker.succeeded()
    assert not breaker.is_open


def test_it_rests_longer_after_each_failed_try_and_one_tries_at_a_time() -> None:
    breaker = opened()
    now_ms = 0
    for rest_ms in (1_000, 2_000, 4_000, 4_000):
        assert not breaker.lets_through(now_ms + rest_ms - 1)
        now_ms += rest_ms
        assert breaker.lets_through(now_ms)
        assert not breaker.lets_through(now_ms), "somebody tries already"
        breaker.failed(now_ms, 0.0)
    now_ms += 4_000
    assert breaker.lets_through(now_ms)
    breaker.succeeded()
    assert not breaker.is_open
    assert all(breaker.lets_through(now_ms) for _ in range(3))


def test_jitter_shortens_the_rest() -> None:
    breaker = CircuitBreaker(POLICY)
    for _ in range(3):
        breaker.failed(0, 1.0)
    assert breaker.lets_through(500)


def test_a_try_that_is_given_up_leaves_it_to_another() -> None:
    breaker = opened()
    assert breaker.lets_through(1_000)
    breaker.abandoned()
    assert breaker.lets_through(1_000)


def test_what_was_asked_before_it_opened_makes_it_rest_no_longer() -> None:
    breaker = opened()
    for _ in range(50):
        breaker.failed(900, 0.0)
    assert breaker.lets_through(1_000)


@given(st.lists(st.sampled_from(["ask", "succeed", "fail", "abandon", "wait"]), max_size=60))
def test_once_it_answers_again_it_closes_whatever_was_before(steps: list[str]) -> None:
    breaker, now_ms, under_way = CircuitBreaker(POLICY), 0.0, 0
    for step in steps:
        if step == "wait":
            now_ms += 700
        elif step == "ask":
            under_way += breaker.lets_through(now_ms)
        elif under_way:
            under_way -= 1
            {
                "succeed": breaker.succeeded,
                "fail": lambda: breaker.failed(now_ms, 0.5),  # noqa: B023 - called at once
                "abandon": breaker.abandoned,
            }[step]()
    for _ in range(under_way):
        breaker.abandoned()
    now_ms += 4_000
    assert breaker.lets_through(now_ms)
    breaker.succeeded()
    assert breaker.lets_through(now_ms)


@pytest.mark.parametrize("failures", [1, 5])
def test_the_number_of_failures_is_the_policys(failures: int) -> None:
    breaker = CircuitBreaker(BreakerPolicy(failures=failures))
    for number in range(failures):
        assert not breaker.is_open, number
        breaker.failed(0, 0.0)
    assert breaker.is_open
