"""The figures of the load benchmarks, held against what a patient person would compute."""

import math
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.service_curve import (
    Interval,
    ServedRequest,
    jain_index,
    largest_gap,
    largest_share_error,
    least_within,
    longest_common_wait,
    percentile,
    served_tokens,
    within,
)
from tests.kit.fair_again import restored_after_ms

_TENANTS = ("a", "b", "c")
_WEIGHTS = {"a": 1.0, "b": 2.0, "c": 4.0}
_END_MS = 30

completions = st.lists(
    st.builds(ServedRequest, st.integers(0, _END_MS - 1), st.sampled_from(_TENANTS), st.integers(1, 50).map(float)),
    max_size=25,
).map(lambda found: sorted(found, key=lambda one: one.at_ms))


def gap_by_hand(found: Sequence[ServedRequest]) -> float:
    """Every pair, every interval."""
    largest = 0.0
    for start in range(_END_MS + 1):
        for end in range(start, _END_MS + 1):
            served = served_tokens(within(found, (start, end)), _TENANTS)
            normalised = [served[tenant] / _WEIGHTS[tenant] for tenant in _TENANTS]
            largest = max(largest, *(abs(one - other) for one, other in combinations(normalised, 2)))
    return largest


@given(completions)
def test_the_largest_gap_is_that_over_every_interval(found: list[ServedRequest]) -> None:
    assert largest_gap(found, _WEIGHTS) == pytest.approx(gap_by_hand(found))


def test_what_evens_out_within_a_millisecond_is_no_gap() -> None:
    found = [
        ServedRequest(1, "a", 100),
        ServedRequest(1, "b", 200),
        ServedRequest(2, "a", 50),
        ServedRequest(2, "b", 100),
    ]

    assert largest_gap(found, {"a": 1.0, "b": 2.0}) == 0


def test_a_gap_in_the_middle_counts_though_the_ends_are_even() -> None:
    found = [ServedRequest(at, "a", 10) for at in range(5)] + [ServedRequest(at, "b", 10) for at in range(5, 10)]

    assert served_tokens(found, _TENANTS) == {"a": 50, "b": 50, "c": 0}
    assert largest_gap(found, {"a": 1.0, "b": 1.0}) == 50


def test_nobody_else_counts() -> None:
    found = [ServedRequest(1, "stranger", 1_000.0), ServedRequest(2, "a", 1.0)]

    assert largest_gap(found, {"a": 1.0, "b": 1.0}) == 1
    assert largest_gap(found, {"a": 1.0}) == 0


@given(completions, st.integers(0, 120))
def test_from_the_moment_of_restoration_on_no_gap_is_above_the_bound(found: list[ServedRequest], bound: int) -> None:
    after_ms = restored_after_ms(found, _WEIGHTS, (0, _END_MS), bound)

    assert largest_gap(within(found, (after_ms, _END_MS)), _WEIGHTS) <= bound
    if after_ms:
        assert largest_gap(within(found, (after_ms - 1, _END_MS)), _WEIGHTS) > bound


intervals = st.tuples(st.integers(-5, 25), st.integers(0, 15)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.dictionaries(st.sampled_from(_TENANTS), st.lists(intervals, max_size=8), min_size=1))
def test_the_common_wait_is_the_longest_stretch_in_which_each_waits(waits: dict[str, list[Interval]]) -> None:
    start, end = 0, 20
    good = [
        all(any(begin <= at < stop for begin, stop in found) for found in waits.values()) for at in range(start, end)
    ]
    longest = run = 0
    for ok in good:
        run = run + 1 if ok else 0
        longest = max(longest, run)
    first, last = longest_common_wait(waits, (start, end))

    assert last - first == longest
    assert all(good[first:last])


@pytest.mark.parametrize(("part", "value"), [(0.0, 1), (0.5, 5), (0.9, 9), (0.91, 10), (0.99, 10), (1.0, 10)])
def test_a_percentile_is_a_value_that_was_seen(part: float, value: int) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], part) == value


def test_figures_of_nothing() -> None:
    assert math.isnan(percentile([], 0.5))
    assert math.isnan(jain_index([]))
    assert math.isnan(jain_index([0.0, 0.0]))
    assert largest_share_error(dict.fromkeys(_TENANTS, 0.0), _WEIGHTS) == math.inf


def test_jain_says_how_many_share() -> None:
    assert jain_index([5.0] * 4) == pytest.approx(1.0)
    assert jain_index([5.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)


def test_the_error_of_a_share_is_relative_to_it() -> None:
    assert largest_share_error({"a": 100, "b": 200, "c": 400}, _WEIGHTS) == pytest.approx(0)
    assert largest_share_error({"a": 90, "b": 210, "c": 400}, _WEIGHTS) == pytest.approx(0.1)


@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 30))
def test_the_worst_window_is_the_worst_of_all(times: list[int], window_ms: int) -> None:
    interval = (5, 35)
    by_hand = min(
        sum(begin <= at < begin + window_ms for at in times)
        for begin in range(interval[0], interval[1] - window_ms + 1)
    )

    assert least_within(times, interval, window_ms) == by_hand


def test_a_window_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit"):
        least_within([], (0, 10), 11)
