"""Bounds of harms: their formulas, their symmetry, and how often they are wrong when somebody looks all the time.

The simulations have fixed seeds. Each compares a count with the number that a true rate, as large as the stated one,
would exceed once in a million.
"""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from scipy.stats import binom

from fairlane_server.rollouts.bounds import HarmBounds, log_likelihood, log_mixture, most_regret
from fairlane_server.rollouts.evidence import LATENCY_BOUNDS_MS, OVERDUE_BUCKET, Moments
from fairlane_server.rollouts.means import cost_ratio_bounds, lost_quality_bounds
from fairlane_server.rollouts.proportions import (
    FailureCount,
    difference_bounds,
    largest_log_likelihood,
    lower_bound,
)
from fairlane_server.rollouts.quantiles import quantile_ms, ratio_bounds

RUNS = 200
LEVEL = 0.05
LEVELS = (LEVEL, LEVEL)
MOST_WRONG = int(binom.isf(1e-6, RUNS, LEVEL))
ALONE = (1.0, 1.0)

Floats = npt.NDArray[np.float64]


@st.composite
def counts(draw: st.DrawFn) -> FailureCount:
    requests = draw(st.integers(1, 2_000))
    return FailureCount(draw(st.integers(0, requests)), requests)


def looks(most: int, growth: float = 1.05) -> list[int]:
    """Every size up to 20, and then whenever there is so much more."""
    found = list(range(1, 21))
    while found[-1] < most:
        found.append(min(most, math.ceil(found[-1] * growth)))
    return found


@given(counts(), st.floats(0.001, 0.999))
def test_the_mixture_is_within_its_regret_of_the_best_rate(count: FailureCount, rate: float) -> None:
    best = log_likelihood(count.failed, count.requests, count.rate)
    mixture = log_mixture(count.failed, count.requests)

    assert best - most_regret(count.requests) <= mixture + 1e-9
    assert log_likelihood(count.failed, count.requests, rate) <= best + 1e-9


@pytest.mark.parametrize("count", [1, 2, 7, 20])
def test_the_mixture_is_the_probability_of_one_sequence(count: int) -> None:
    total = sum(math.comb(count, hits) * math.exp(log_mixture(hits, count)) for hits in range(count + 1))

    assert total == pytest.approx(1.0)


@given(counts(), counts(), st.floats(-0.99, 0.99))
def test_the_cubic_has_the_largest_likelihood(one: FailureCount, other: FailureCount, difference: float) -> None:
    rates = np.linspace(max(0.0, -difference), min(1.0, 1.0 - difference), 101)[1:-1]
    found = largest_log_likelihood(one, other, difference)

    for rate in rates.tolist():
        likelihood = log_likelihood(one.failed, one.requests, min(1.0, max(0.0, rate + difference)))
        assert found >= likelihood + log_likelihood(other.failed, other.requests, rate) - 1e-6


@given(counts(), counts())
def test_exchanged_roles_give_exchanged_bounds_of_failures(one: FailureCount, other: FailureCount) -> None:
    forth, back = difference_bounds(one, other, *LEVELS), difference_bounds(other, one, *LEVELS)

    assert (back.lower, back.upper) == (-forth.upper, -forth.lower)
    assert forth.lower <= forth.harm <= forth.upper


@given(counts(), counts())
def test_a_further_failure_does_not_lower_the_harm(one: FailureCount, other: FailureCount) -> None:
    """But for 0.02 where none, or all, failed: the mixture's distance from the best rate is larger there."""
    assume(one.failed < one.requests)
    more = FailureCount(one.failed + 1, one.requests)
    slack = 1e-4 if 2 < one.failed < one.requests - 3 else 0.02

    assert lower_bound(more, other, LEVEL) >= lower_bound(one, other, LEVEL) - slack
    assert lower_bound(other, more, LEVEL) <= lower_bound(other, one, LEVEL) + slack


@given(counts(), counts(), st.floats(0, 50))
@example(FailureCount(0, 8), FailureCount(4, 4), 2.2e-313)
@example(FailureCount(0, 100_000), FailureCount(90_000, 100_000), 1e-3)
def test_missing_requests_never_sharpen_the_bounds(one: FailureCount, other: FailureCount, missing: float) -> None:
    assume(one.failed + missing <= one.requests)
    assume(other.failed + missing <= other.requests)
    known, unknown = (difference_bounds(one, other, *LEVELS, (gone, gone)) for gone in (0.0, missing))

    assert unknown.lower <= known.lower
    assert unknown.upper >= known.upper


def test_bounds_where_the_weights_of_requests_do_not_add_up() -> None:
    weight = 1.4
    failing = FailureCount(7 / weight, 10 / weight)
    found = difference_bounds(failing, FailureCount(0.0, 10 / weight), *LEVELS, (3 / weight + 1e-9, 0.0))

    assert found.lower < found.harm < found.upper == 1.0


histograms = st.dictionaries(st.integers(150, 260), st.integers(1, 400), min_size=1, max_size=12).map(
    lambda found: [float(found.get(bucket, 0)) for bucket in range(OVERDUE_BUCKET + 1)]
)


@given(histograms, histograms)
def test_exchanged_roles_give_exchanged_bounds_of_latency(one: list[float], other: list[float]) -> None:
    forth, back = ratio_bounds(one, other, 0.95, *LEVELS), ratio_bounds(other, one, 0.95, *LEVELS)

    for low, high in ((forth.lower, back.upper), (back.lower, forth.upper)):
        assert (1 + low) * (1 + high) == pytest.approx(1.0) or (low, high) == (-1.0, math.inf)
    assert forth.lower <= forth.harm <= forth.upper


@given(histograms, histograms, st.integers(1, 100))
def test_slower_by_some_buckets_is_slower_by_their_ratio(one: list[float], other: list[float], steps: int) -> None:
    slower = [0.0] * steps + one[:-steps]
    before, after = ratio_bounds(one, other, 0.95, *LEVELS), ratio_bounds(slower, other, 0.95, *LEVELS)

    ratio = 2 ** (steps / 32)
    assert 1 + after.harm == pytest.approx(ratio * (1 + before.harm))
    assert 1 + after.lower == pytest.approx(ratio * (1 + before.lower))
    assert 1 + after.upper == pytest.approx(ratio * (1 + before.upper))


def test_the_bounds_of_latency_are_those_of_a_search_over_all_pairs_of_buckets() -> None:
    """The search walks two pointers; this tries every pair."""
    random, exceeding = np.random.default_rng(3), 1.0 - 0.95
    candidate, control = (histogram(np.exp(random.normal(5.0 + shift, 0.6, 700))) for shift in (0.4, 0.0))
    above, others = (np.cumsum(one[::-1])[::-1] for one in (candidate, control))

    def evidence(count: float, total: float, *, more: bool) -> float:
        if (count > exceeding * total) != more or count == exceeding * total:
            return -most_regret(total) - math.log(2)
        mixture = np.logaddexp(log_mixture(count, total), log_mixture(count, total, 10, 190)) - math.log(2)
        return float(mixture) - log_likelihood(count, total, exceeding)

    def is_rejected(steps: int) -> bool:
        places = [min(OVERDUE_BUCKET + 1, max(0, bucket + steps + 1)) for bucket in range(OVERDUE_BUCKET + 1)]
        return all(
            evidence([*above, 0.0][place], above[0], more=True) + evidence(others[bucket], others[0], more=False)
            >= math.log(1 / LEVEL)
            for bucket, place in enumerate(places)
        )

    found = ratio_bounds(candidate, control, 0.95, *LEVELS)
    steps = round(32 * math.log2(1 + found.lower))
    assert steps > 0
    assert is_rejected(steps)
    assert not is_rejected(steps + 1)


def histogram(latencies_ms: Floats) -> list[float]:
    buckets = np.searchsorted(LATENCY_BOUNDS_MS, latencies_ms, side="right")
    return [float(count) for count in np.bincount(buckets, minlength=OVERDUE_BUCKET + 1)]


def test_nothing_is_known_without_requests() -> None:
    nothing = [0.0] * (OVERDUE_BUCKET + 1)
    for bounds in (
        difference_bounds(FailureCount(0, 0), FailureCount(1, 5), *LEVELS),
        ratio_bounds(nothing, histogram(np.ones(9)), 0.95, *LEVELS),
    ):
        assert math.isnan(bounds.harm)
        assert (bounds.lower, bounds.upper) == (-math.inf, math.inf)


def test_a_quantile_is_in_its_bucket_and_unbounded_among_the_overdue() -> None:
    latencies = np.arange(1.0, 1_001.0)
    assert quantile_ms(histogram(latencies), 0.95) == pytest.approx(950, rel=0.03)

    overdue = [0.0] * OVERDUE_BUCKET + [3.0]
    assert quantile_ms(overdue, 0.95) == math.inf


def test_hanging_requests_are_slower_than_any() -> None:
    overdue, usual = [0.0] * OVERDUE_BUCKET + [300.0], histogram(np.full(300, 80.0))
    bounds = ratio_bounds(overdue, usual, 0.95, *LEVELS)

    assert bounds.harm == math.inf
    assert bounds.lower > 1_000


def wrong(found: Iterator[HarmBounds], truth: float) -> tuple[bool, bool]:
    """Whether the lower, or the upper, bound was ever beyond the truth."""
    too_high = too_low = False
    for bounds in found:
        too_high |= bounds.lower >= truth + 1e-9
        too_low |= bounds.upper <= truth - 1e-9
    return too_high, too_low


def is_valid(ends: list[tuple[bool, bool]]) -> bool:
    assert len(ends) == RUNS
    return all(sum(of_one) <= MOST_WRONG for of_one in zip(*ends, strict=True))


@pytest.mark.parametrize(("rates", "sizes"), [((0.02, 0.02), (1, 1)), ((0.5, 0.45), (1, 1)), ((0.1, 0.02), (1, 5))])
def test_bounds_of_failures_hold_at_all_looks(rates: tuple[float, float], sizes: tuple[int, int]) -> None:
    """With arms of one size, and with a control of five times the size."""
    random = np.random.default_rng(11)
    ends = []
    for _ in range(RUNS):
        failed = [
            np.cumsum(random.random(1_500 * size) < rate, dtype=np.float64)
            for rate, size in zip(rates, sizes, strict=True)
        ]

        def bounds(failed: list[Floats] = failed) -> Iterator[HarmBounds]:
            for look in looks(1_500, 1.25):
                one, other = (
                    FailureCount(float(arm[size * look - 1]), size * look)
                    for arm, size in zip(failed, sizes, strict=True)
                )
                yield difference_bounds(one, other, *LEVELS)

        ends.append(wrong(bounds(), rates[0] - rates[1]))
    assert is_valid(ends)


@pytest.mark.parametrize("slower", [1.0, 1.5])
def test_bounds_of_latency_hold_at_all_looks(slower: float) -> None:
    random = np.random.default_rng(12)
    ends = []
    for _ in range(RUNS):
        candidate, control = (np.exp(random.normal(5.0, 1.0, 1_500)) * factor for factor in (slower, 1.0))

        def bounds(one: Floats = candidate, other: Floats = control) -> Iterator[HarmBounds]:
            for look in looks(1_500, 1.3)[10:]:
                yield ratio_bounds(histogram(one[:look]), histogram(other[:look]), 0.95, *LEVELS)

        ends.append(wrong(bounds(), slower - 1.0))
    assert is_valid(ends)


@pytest.mark.parametrize("spread", [0.3, 1.5])
def test_bounds_of_costs_hold_at_all_looks(spread: float) -> None:
    """Of small and of heavy tails."""
    random = np.random.default_rng(13)
    ends = []
    for _ in range(RUNS):
        costs = [np.exp(random.normal(9.0, spread, 4_000)) * factor for factor in (1.2, 1.0)]

        def bounds(costs: list[Floats] = costs) -> Iterator[HarmBounds]:
            for look in looks(4_000):
                if look >= 50:
                    one, other = (moments(arm[:look]) for arm in costs)
                    yield cost_ratio_bounds(one, other, 1.1, LEVELS, ALONE)

        ends.append(wrong(bounds(), 0.2))
    assert is_valid(ends)


@pytest.mark.parametrize("good", [0.5, 0.97])
def test_bounds_of_quality_hold_at_all_looks(good: float) -> None:
    random = np.random.default_rng(14)
    ends = []
    for _ in range(RUNS):
        scores = [(random.random(4_000) < part).astype(float) for part in (good - 0.1, good)]

        def bounds(scores: list[Floats] = scores) -> Iterator[HarmBounds]:
            for look in looks(4_000):
                if look >= 50:
                    one, other = (moments(arm[:look]) for arm in scores)
                    yield lost_quality_bounds(one, other, 0.02, LEVELS, ALONE)

        ends.append(wrong(bounds(), 0.1))
    assert is_valid(ends)


def test_an_interval_for_one_look_does_not_hold_at_all_looks() -> None:
    """The same check finds it wrong in far more runs."""
    random = np.random.default_rng(15)
    ends = []
    for _ in range(RUNS):
        values = random.normal(0.0, 1.0, 4_000)

        def bounds(values: Floats = values) -> Iterator[HarmBounds]:
            for look in looks(4_000):
                mean, half = float(values[:look].mean()), 1.645 / math.sqrt(look)
                yield HarmBounds(mean, mean - half, mean + half)

        ends.append(wrong(bounds(), 0.0))
    assert not is_valid(ends)


def moments(values: Floats) -> Moments:
    return Moments(len(values), float(values.sum()), float((values * values).sum()))


def test_equal_values_are_no_certainty_and_enough_of_them_are_proof() -> None:
    few, many = (Moments.of([7.0] * count) for count in (30, 1_000))
    few_scores, many_scores = (Moments.of([1.0] * count) for count in (60, 5_000))

    assert cost_ratio_bounds(few, few, 1.1, LEVELS, ALONE).upper > 0.1
    assert cost_ratio_bounds(many, many, 1.1, LEVELS, ALONE).upper < 0.1
    assert lost_quality_bounds(few_scores, few_scores, 0.02, LEVELS, ALONE).upper > 0.02
    assert lost_quality_bounds(many_scores, many_scores, 0.02, LEVELS, ALONE).upper < 0.02


def test_costs_beside_a_control_that_costs_nothing_have_no_ratio() -> None:
    free, priced = Moments.of([0.0] * 100), Moments.of([5.0] * 100)

    assert cost_ratio_bounds(priced, free, 1.1, LEVELS, ALONE).upper == math.inf
    assert cost_ratio_bounds(free, priced, 1.1, LEVELS, ALONE).upper == -1.0
