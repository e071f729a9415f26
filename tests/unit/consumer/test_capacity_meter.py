"""What is measured of the engines: rates that follow them, however the batches were, and are never invented."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairlane.outcomes import Health
from inference_consumers.capacity.measurement import (
    FAILING_AFTER,
    FRESH_FOR_S,
    RETRIED_AFTER_MS,
    SUPERSEDED_AFTER,
    CapacityMeter,
    MeasuredRun,
    Rates,
)

RUNS = st.builds(
    MeasuredRun,
    items=st.integers(1, 64),
    prompt_tokens=st.integers(0, 10_000),
    completion_tokens=st.integers(0, 10_000),
    cost_tokens=st.integers(1, 30_000),
    seconds=st.floats(1e-4, 100),
)


def run(items: int, cost_tokens_per_s: float, seconds: float = 0.1) -> MeasuredRun:
    cost = round(cost_tokens_per_s * seconds)
    return MeasuredRun(items, cost // 2, cost // 4, cost, seconds)


def meter(*runs: MeasuredRun) -> CapacityMeter:
    made = CapacityMeter()
    for one in runs:
        made.ran(one)
    return made


def cost_rate(made: CapacityMeter) -> float:
    return made.rates.cost_tokens_per_s


def test_nothing_is_known_before_the_first_run() -> None:
    made = CapacityMeter()
    assert (made.rates, made.batch_fill, made.health(0)) == (Rates(0, 0, 0), 0.0, Health.HEALTHY)


@given(RUNS)
def test_the_first_run_is_believed(first: MeasuredRun) -> None:
    rates = meter(first).rates
    assert rates.prompt_tokens_per_s == pytest.approx(first.prompt_tokens / first.seconds)
    assert rates.completion_tokens_per_s == pytest.approx(first.completion_tokens / first.seconds)
    assert rates.cost_tokens_per_s == pytest.approx(first.cost_tokens / first.seconds)


@given(st.lists(RUNS, min_size=1, max_size=40))
def test_a_rate_lies_between_those_that_were_measured(runs: list[MeasuredRun]) -> None:
    measured = [one.cost_tokens / one.seconds for one in runs]
    assert min(measured) * 0.999 <= cost_rate(meter(*runs)) <= max(measured) * 1.001


@given(
    history=st.lists(st.floats(0.8, 1.25), min_size=1, max_size=50),
    factor=st.floats(1, 20),
    later=st.lists(st.floats(0.9, 1.1), min_size=10, max_size=10),
    items=st.integers(1, 64),
)
def test_a_slowdown_is_followed_within_ten_runs(
    history: list[float], factor: float, later: list[float], items: int
) -> None:
    """Runs of like size, at about 1,000 tokens per second and then at a fraction of it."""
    made = meter(*(MeasuredRun(items, 100, 100, 300, 0.3 * jitter) for jitter in history))
    for jitter in later:
        made.ran(MeasuredRun(items, 100, 100, 300, 0.3 * jitter * factor))
    assert 0.85 * 1_000 / factor <= cost_rate(made) <= 1.25 * 1_000 / factor


@pytest.mark.parametrize(("factor", "runs"), [(2, 3), (4, 4), (10, 6)])
def test_how_soon_a_slowdown_shows(factor: float, runs: int) -> None:
    """Most of it within a few runs: the report is at most half as much again as what is true."""
    made = meter(*(run(32, 1_000) for _ in range(20)))
    for _ in range(runs):
        made.ran(run(32, 1_000 / factor, seconds=0.1 * factor))
    assert cost_rate(made) < 1.5 * 1_000 / factor


def test_a_recovery_is_followed() -> None:
    made = meter(*(run(32, 100, seconds=1) for _ in range(20)))
    for _ in range(10):
        made.ran(run(32, 1_000))
    assert cost_rate(made) > 700


def test_one_stall_is_no_slow_engine() -> None:
    """A process that was paused for a minute within a run of a tenth of a second."""
    made = meter(*(run(8, 1_000) for _ in range(20)), MeasuredRun(8, 50, 25, 100, 60))
    assert cost_rate(made) > 500
    for _ in range(6):
        made.ran(run(8, 1_000))
    assert cost_rate(made) > 900


def test_the_batch_size_that_gives_most_is_reported_and_quiet_hours_do_not_forget_it() -> None:
    made = meter(run(32, 8_000), run(1, 300), run(16, 5_000))
    for _ in range(1_000):
        made.ran(run(1, 300))
    assert made.rates == meter(run(32, 8_000)).rates


@given(st.integers(1, 5), st.floats(0.05, 0.9))
def test_an_old_peak_of_a_smaller_batch_does_not_hide_a_slowdown(smaller: int, slowed: float) -> None:
    made = meter(run(2**smaller // 2, 900), *(run(2**smaller, 1_000) for _ in range(10)))
    for _ in range(10):
        made.ran(run(2**smaller, 1_000 * slowed, seconds=0.1 / slowed))
    assert cost_rate(made) < 1_000 * slowed * 1.25


def test_sizes_that_both_run_are_both_known() -> None:
    """Some batches are padded so badly that smaller ones give more."""
    made = CapacityMeter()
    for _ in range(20):
        for _ in range(SUPERSEDED_AFTER - 1):
            made.ran(run(32, 500))
        made.ran(run(8, 1_000))
    assert cost_rate(made) == pytest.approx(1_000)


def for_engine_time(made: CapacityMeter, one: MeasuredRun, seconds: float) -> None:
    for _ in range(round(seconds / one.seconds) + 1):
        made.ran(one)


def test_an_old_peak_counts_for_no_more_than_what_newer_runs_vouch_for() -> None:
    """A peak that was never true: batches of half the size show a fortieth of it."""
    made = meter(run(32, 132_000))
    for_engine_time(made, run(16, 3_200), FRESH_FOR_S / 2)
    assert cost_rate(made) == pytest.approx(132_000), "it may well be: nothing says that it is old"
    for_engine_time(made, run(16, 3_200), FRESH_FOR_S / 2)
    assert cost_rate(made) == pytest.approx(2 * 3_200)
    made.ran(run(32, 5_120))
    assert cost_rate(made) == pytest.approx(5_120), "begun anew, not averaged with what is old"


@given(
    peak=st.floats(1_000, 1e6),
    size=st.integers(1, 6),
    smaller=st.integers(0, 5),
    rate=st.floats(100, 1e5),
    seconds=st.floats(0.01, 2),
)
def test_an_old_peak_is_bounded_by_its_number_of_items(
    peak: float, size: int, smaller: int, rate: float, seconds: float
) -> None:
    smaller = min(smaller, size - 1)
    made, small = meter(MeasuredRun(2**size, 1, 1, round(peak), 1.0)), run(2**smaller, rate, seconds)
    if small.cost_tokens <= 0:
        return
    for_engine_time(made, small, FRESH_FOR_S)
    fresh = small.cost_tokens / small.seconds
    assert fresh * 0.999 <= cost_rate(made) <= max(fresh, min(round(peak), 2 ** (size - smaller) * fresh)) * 1.001


def test_one_stall_makes_no_peak_old() -> None:
    made = meter(run(32, 8_000), run(1, 100), MeasuredRun(1, 5, 2, 10, 10 * FRESH_FOR_S))
    assert cost_rate(made) == pytest.approx(8_000)


def test_a_run_in_which_nothing_succeeded_says_nothing_about_speed() -> None:
    made = meter(run(4, 1_000), MeasuredRun(4, 0, 0, 0, 0.001), MeasuredRun(4, 0, 0, 0, 100))
    assert cost_rate(made) == pytest.approx(1_000)


@given(st.lists(st.floats(0, 5), min_size=1, max_size=30))
def test_the_fill_of_batches_is_a_part_of_one(fills: list[float]) -> None:
    made = CapacityMeter()
    for fill in fills:
        made.finished(fill, failed=False)
    assert 0 <= made.batch_fill <= 1
    assert min(1.0, *fills) - 1e-9 <= made.batch_fill <= min(1.0, max(fills)) + 1e-9


@given(st.lists(st.sampled_from([True, False, None]), max_size=30))
def test_it_is_failing_while_the_latest_batches_all_failed(batches: list[bool | None]) -> None:
    made = CapacityMeter()
    for failed in batches:
        made.finished(1, failed=failed)
    judged = [failed for failed in batches if failed is not None]
    failing = len(judged) >= FAILING_AFTER and all(judged[-FAILING_AFTER:])
    assert made.health(0) == (Health.FAILING if failing else Health.HEALTHY)


def test_one_that_failed_and_was_left_alone_is_tried_again() -> None:
    """Beside healthy ones it gets no work while it says that it fails, and only work can show that it recovered."""
    made = CapacityMeter()
    for _ in range(FAILING_AFTER):
        made.finished(1, failed=True)
    assert made.health(RETRIED_AFTER_MS - 1) == Health.FAILING
    assert made.health(RETRIED_AFTER_MS) == Health.HEALTHY
    made.finished(1, failed=True)
    assert made.health(0) == Health.FAILING, "one more failure is enough"
    made.finished(1, failed=False)
    assert made.health(0) == Health.HEALTHY
