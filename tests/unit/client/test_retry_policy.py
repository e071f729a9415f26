"""When a request is published again."""

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fairlane.client.retry_policies import NO_RETRIES, HandlerRetries, RetryPolicy
from fairlane.records import InferenceReply

CHANCES = st.floats(0, 1, exclude_max=True)
TIMES_MS = st.integers(0, 200_000)
POLICIES = st.builds(RetryPolicy, tries=st.integers(1, 10), within_ms=st.integers(1, 100_000))


def refused(retry_after_ms: int | None, outcome: str = "rejected") -> InferenceReply:
    return InferenceReply("id", "acme", outcome, code="overloaded", retry_after_ms=retry_after_ms)


@given(POLICIES, TIMES_MS, st.integers(1, 12), TIMES_MS, st.none() | st.integers(1, 200_000), CHANCES)
def test_a_try_is_never_early_never_late_and_never_one_too_many(
    policy: RetryPolicy, retry_after_ms: int, tries: int, elapsed_ms: int, timeout_ms: int | None, chance: float
) -> None:
    wait_ms = policy.wait_after_refusal_ms(refused(retry_after_ms), tries, elapsed_ms, timeout_ms, chance)
    lost_wait_ms = policy.wait_after_lost_ms(tries, elapsed_ms, timeout_ms, chance)
    for found in (wait_ms, lost_wait_ms):
        if found is not None:
            assert tries < policy.tries
            assert 0 < found <= policy.within_ms - elapsed_ms
            assert timeout_ms is None or elapsed_ms + found < timeout_ms
    if wait_ms is not None:
        assert retry_after_ms <= wait_ms <= max(retry_after_ms, 5_000) * 1.2 + 1
        assert retry_after_ms <= policy.longest_wait_ms


@given(st.integers(0, 10_000), CHANCES)
def test_what_is_allowed_is_tried(retry_after_ms: int, chance: float) -> None:
    assert RetryPolicy().wait_after_refusal_ms(refused(retry_after_ms), 1, 0, None, chance) is not None
    assert RetryPolicy().wait_after_lost_ms(1, 0, None, chance) is not None
    assert NO_RETRIES.wait_after_refusal_ms(refused(retry_after_ms), 1, 0, None, chance) is None
    assert NO_RETRIES.wait_after_lost_ms(1, 0, None, chance) is None


@given(st.integers(1, 8), CHANCES)
def test_a_service_that_says_at_once_every_time_is_asked_less_and_less_often(tries: int, chance: float) -> None:
    policy = RetryPolicy(tries=20)
    first = policy.wait_after_refusal_ms(refused(0), tries, 0, None, chance)
    second = policy.wait_after_refusal_ms(refused(0), tries + 1, 0, None, chance)
    assert first is not None
    assert second is not None
    assert first >= 50
    assume(first < 2_000)
    assert second > first


@pytest.mark.parametrize(
    "final",
    [
        refused(None),
        *(refused(10, outcome) for outcome in ("ok", "expired", "cancelled", "failed", "of a later version")),
        refused(30_001),
    ],
)
def test_all_else_is_final(final: InferenceReply) -> None:
    assert RetryPolicy().wait_after_refusal_ms(final, 1, 0, None, 0.5) is None


@pytest.mark.parametrize("name", ["tries", "within_ms", "longest_wait_ms"])
def test_a_bound_below_1_is_a_mistake(name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: 0 is below 1"):
        RetryPolicy(**{name: 0})


@given(st.integers(1, 8), st.integers(0, 1_000), st.integers(0, 5_000), st.integers(1, 10), CHANCES)
def test_a_handler_is_called_so_often_and_waits_are_bounded(
    tries: int, first_wait_ms: int, longest_wait_ms: int, failures: int, chance: float
) -> None:
    retries = HandlerRetries(tries, first_wait_ms, longest_wait_ms)
    wait_s = retries.wait_s(failures, chance)
    assert (wait_s is None) == (failures >= tries)
    if wait_s is not None:
        assert 0 <= wait_s * 1_000 <= longest_wait_ms
    total_ms = 1_000 * sum(retries.wait_s(count, chance) or 0 for count in range(1, tries))
    assert total_ms <= retries.longest_total_ms + 1


def test_a_handler_that_is_never_called_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"^tries: 0 is below 1"):
        HandlerRetries(tries=0)
    with pytest.raises(ValueError, match=r"^first_wait_ms: -1 is below 0"):
        HandlerRetries(first_wait_ms=-1)
