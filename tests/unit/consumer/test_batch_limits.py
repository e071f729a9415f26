"""The safe size: halved when memory runs out, raised by an eighth when enough went well."""

from hypothesis import given
from hypothesis import strategies as st

from inference_consumers.batching.batch_size import FULL_RUNS_BEFORE_MORE, BatchLimits, SafeSize

LIMITS = BatchLimits(max_items=32, max_tokens=8_192, timeout_ms=20)


def sizes(safe: SafeSize) -> tuple[int, int]:
    bounded = safe.bounded(LIMITS)
    assert bounded.timeout_ms == LIMITS.timeout_ms
    return bounded.max_items, bounded.max_tokens


def run_full(safe: SafeSize, times: int = FULL_RUNS_BEFORE_MORE) -> None:
    for _ in range(times):
        safe.ran(*sizes(safe), LIMITS)


def test_nothing_is_lowered_before_anything_failed() -> None:
    safe = SafeSize()
    run_full(safe, 100)
    assert sizes(safe) == (32, 8_192)


def test_half_of_what_failed() -> None:
    safe = SafeSize()
    safe.out_of_memory(20, 6_000)
    assert sizes(safe) == (10, 3_000)
    safe.out_of_memory(10, 3_000)
    assert sizes(safe) == (5, 1_500)


def test_a_bound_is_at_least_one() -> None:
    safe = SafeSize()
    for _ in range(20):
        safe.out_of_memory(*sizes(safe))
    assert sizes(safe) == (1, 1)


def test_after_32_full_runs_an_eighth_more_is_tried() -> None:
    safe = SafeSize()
    safe.out_of_memory(32, 8_192)
    run_full(safe, FULL_RUNS_BEFORE_MORE - 1)
    assert sizes(safe) == (16, 4_096)
    run_full(safe, 1)
    assert sizes(safe) == (18, 4_608)


def test_runs_that_were_not_full_prove_nothing() -> None:
    safe = SafeSize()
    safe.out_of_memory(32, 8_192)
    for _ in range(200):
        safe.ran(8, 2_048, LIMITS)
    assert sizes(safe) == (16, 4_096)


def test_each_bound_is_raised_by_the_runs_that_reach_it() -> None:
    safe = SafeSize()
    safe.out_of_memory(32, 8_192)
    for _ in range(FULL_RUNS_BEFORE_MORE):
        safe.ran(2, 4_000, LIMITS)
    assert sizes(safe) == (16, 4_608)


def test_a_try_that_fails_goes_back_to_what_was_proved_and_waits_longer() -> None:
    safe = SafeSize()
    safe.out_of_memory(32, 8_192)
    run_full(safe)
    safe.out_of_memory(18, 4_608)
    assert sizes(safe) == (16, 4_096), "not half of the try"
    run_full(safe, 2 * FULL_RUNS_BEFORE_MORE - 1)
    assert sizes(safe) == (16, 4_096)
    run_full(safe, 1)
    assert sizes(safe) == (18, 4_608)


def test_what_was_proved_is_halved_when_it_fails_after_all() -> None:
    safe = SafeSize()
    safe.out_of_memory(32, 8_192)
    run_full(safe)
    safe.out_of_memory(12, 4_000)
    assert sizes(safe) == (6, 2_000)


def test_a_number_of_items_that_was_proved_is_not_blamed_for_too_many_tokens() -> None:
    safe = SafeSize()
    safe.out_of_memory(32, 3_000)
    for _ in range(FULL_RUNS_BEFORE_MORE):
        safe.ran(16, 100, LIMITS)
    assert sizes(safe) == (18, 1_500)
    safe.out_of_memory(4, 1_400)
    assert sizes(safe) == (18, 700)


def test_in_the_end_the_configured_bounds_hold_again() -> None:
    safe = SafeSize()
    safe.out_of_memory(32, 8_192)
    run_full(safe, 8 * FULL_RUNS_BEFORE_MORE)
    assert sizes(safe) == (32, 8_192)


@given(memory=st.integers(1, 10_000), runs=st.integers(200, 3_000))
def test_failures_become_rare_and_the_bound_stays_near_what_fits(memory: int, runs: int) -> None:
    """An engine that holds so many tokens, under load: what fails is a small part of the runs."""
    safe, failed, used = SafeSize(), 0, 0
    for _ in range(runs):
        _, tokens = sizes(safe)
        if tokens > memory:
            failed += 1
            safe.out_of_memory(1, tokens)
        else:
            used += tokens
            safe.ran(1, tokens, LIMITS)
    assert failed <= 14 + runs / FULL_RUNS_BEFORE_MORE / 2
    assert used / runs >= 0.4 * min(memory, LIMITS.max_tokens)
