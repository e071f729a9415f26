"""Evidence of drift: p-values are uniform, bets have the mean 1, and alarms without drift are as rare as is stated.

The simulations have fixed seeds. Each compares a count with the number that a true rate, as large as the stated one,
would exceed once in a million.
"""

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import kstest, poisson

from fairlane_server.drift.evidence import (
    EXPONENTS,
    LEAST_P,
    MOST_LOG_BET,
    NO_EVIDENCE,
    DriftEvidence,
    log_bet,
    p_value,
    score_bin,
)


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_a_bet_on_a_uniform_p_value_wins_nothing_on_average(exponent: float) -> None:
    mean, _ = quad(lambda p: math.exp(log_bet(p, exponent)), 0, 1, points=[LEAST_P])

    assert mean == pytest.approx(1.0)


@given(st.floats(1e-12, 1), st.floats(1e-12, 1), st.sampled_from(EXPONENTS))
def test_a_smaller_p_value_never_wins_less_and_the_gain_is_bounded(one: float, other: float, exponent: float) -> None:
    low, high = sorted((one, other))

    assert log_bet(high, exponent) <= log_bet(low, exponent) <= MOST_LOG_BET


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(1e-9, 1))
def test_p_values_order_blocks_by_their_scores(scores: list[float], chance: float) -> None:
    *earlier, last = map(score_bin, scores)
    counts = {one: earlier.count(one) for one in earlier}

    p = p_value(counts, last, chance)

    larger = sum(one > last for one in earlier)
    assert larger / len(scores) <= p <= (larger + earlier.count(last) + 1) / len(scores)
    assert p > 0


def test_p_values_of_exchangeable_scores_are_uniform_and_independent() -> None:
    """Also with many equal scores."""
    drawn = random.Random(5)
    counts: dict[int, int] = {}
    found = []
    for _ in range(4_000):
        score = score_bin(float(drawn.choice((0, 1, 1, 1, 2, 3, 50))))
        found.append(p_value(counts, score, 1.0 - drawn.random()))
        counts[score] = counts.get(score, 0) + 1

    assert kstest(found, "uniform").pvalue > 1e-3
    low = [one < 0.5 for one in found]
    both = sum(one and other for one, other in pairwise(low))
    assert abs(both - 1_000) < 5 * math.sqrt(4_000 * 3 / 16)


@pytest.mark.parametrize("blocks_per_alarm", [100, 1_000])
def test_alarms_without_drift_are_no_more_than_one_in_so_many_blocks(blocks_per_alarm: int) -> None:
    blocks = 100 * blocks_per_alarm
    drawn = random.Random(blocks_per_alarm)
    evidence, alarms = NO_EVIDENCE, 0
    for number in range(blocks):
        evidence = evidence.after(1.0 - drawn.random(), number)
        if evidence.log >= math.log(blocks_per_alarm):
            alarms, evidence = alarms + 1, NO_EVIDENCE

    assert 0 < alarms <= poisson.isf(1e-6, blocks / blocks_per_alarm)


def test_the_mean_of_the_evidence_is_the_number_of_blocks() -> None:
    """It is so without drift: this is what the rate of alarms follows from."""
    total, runs, blocks = 0.0, 4_000, 8
    for run in range(runs):
        drawn = random.Random(run)
        evidence = NO_EVIDENCE
        for number in range(blocks):
            evidence = evidence.after(1.0 - drawn.random(), number)
        total += math.exp(evidence.log)

    assert 0.5 * blocks < total / runs < 1.5 * blocks


def test_a_few_strange_blocks_are_no_alarm() -> None:
    evidence = NO_EVIDENCE
    for number in range(4):
        evidence = evidence.after(1e-9, number)

    assert evidence.log < math.log(1e6) < 6 * MOST_LOG_BET


@given(st.integers(1, 60), st.integers(0, 2**32))
def test_the_change_is_dated_to_where_strange_blocks_began(usual: int, seed: int) -> None:
    drawn = random.Random(seed)
    evidence = NO_EVIDENCE
    for number in range(usual):
        evidence = evidence.after(drawn.uniform(0.5, 1), number)
    for number in range(usual, usual + 6):
        evidence = evidence.after(drawn.uniform(0, 0.01), number)

    assert evidence.changed_at_ms == usual


def test_evidence_without_blocks_is_none() -> None:
    assert DriftEvidence().log == -math.inf
